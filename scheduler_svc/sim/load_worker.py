"""A worker that costs time and computes nothing: columns by slot, as the core keeps them.

Modelled, all of it: plans are taken as they come and not checked (the world does that). A step's
copies of blocks are waited for. A request gives its tokens until its length is reached. Plans and
results overtake nobody, however their ways scatter.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.events import StepCompleted, WorkerJoined
from scheduler_svc.core.ready import StepPlan
from scheduler_svc.core.types import FinishReason, Slot, WorkerId
from scheduler_svc.sim.cost import QUERY_TILE, StepCost
from scheduler_svc.sim.scatter import Draws

VOCAB_SIZE = 50_000
Column = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Stepped:
    """A step that has been computed. Rows that sampled, by the numbers of their requests."""

    begin_s: float
    end_s: float
    completed: StepCompleted
    requests: Sequence[int]
    num_prefill_rows: int
    num_decode_rows: int
    num_prefill_tokens: int


class _Batch:
    """The rows of a step, and what is the same in each step with them."""

    def __init__(
        self, slots: Collection[int], num_tokens: Collection[int], request: Column, last: Column
    ) -> None:
        self.rows = np.fromiter(slots, np.int64, len(slots))
        self.slots = cast(tuple[Slot, ...], tuple(slots))
        self.num_tokens = np.fromiter(num_tokens, np.int64, len(num_tokens))
        self.num_in_all = int(np.add.reduce(self.num_tokens))
        self.num_single = int(np.count_nonzero(self.num_tokens == 1))
        self.is_single = self.num_single == len(slots)
        self.num_readings = -(-self.num_tokens // QUERY_TILE)
        numbers = request[self.rows]
        self.requests: list[int] = numbers.tolist()
        self.salt = numbers * 7919
        self.last = last[self.rows]

    def of(self, chosen: npt.NDArray[np.bool_], request: Column, last: Column) -> "_Batch":
        """Some of the rows."""
        num_tokens = self.num_tokens[chosen].tolist()
        return _Batch(self.rows[chosen].tolist(), num_tokens, request, last)


class LoadWorker:
    """Takes plans, and gives a step after the other. Requests are known by number."""

    def __init__(
        self, joined: WorkerJoined, cost: StepCost, num_outputs: dict[int, int], draws: Draws
    ) -> None:
        self.worker_id: WorkerId = joined.worker_id
        self.plans: deque[tuple[float, StepPlan]] = deque()
        self.free_s = 0.0
        self.last_return_s = 0.0
        self.computing = False
        self.draws = draws
        self._cost = cost
        self._block_bytes = joined.capacity.block_bytes
        self._num_outputs = num_outputs
        count = joined.capacity.num_slots
        self._known = np.zeros(count, np.int64)
        self._computed = np.zeros(count, np.int64)
        self._last = np.zeros(count, np.int64)  # known tokens at which the request ends
        self._request = np.full(count, -1, np.int64)
        self._ended = np.zeros(count, np.bool_)
        self._planned: dict[int, int] = {}
        self._batch = _Batch((), (), self._request, self._last)
        self._some_have_ended = False  # of the batch

    def take(self, plan: StepPlan, arrives_s: float) -> None:
        """Queues a plan, each of its steps singly."""
        if self.plans:
            arrives_s = max(arrives_s, self.plans[-1][0])
        self.plans.append((arrives_s, plan))
        for _ in range(plan.num_steps - 1):
            self.plans.append((arrives_s, _REPEAT))

    def compute(self, step: int, now_s: float, half_trip_s: float) -> Stepped:
        """The next step, begun now; its worker is free at its end, and its result takes so long."""
        arrived_s, plan = self.plans.popleft()
        copied = 0 if plan is _REPEAT else self._apply(plan)
        batch, num_wasted = self._batch, 0
        if self._some_have_ended:
            alive = ~self._ended[batch.rows]
            num_wasted = len(alive) - int(np.count_nonzero(alive))
            batch = batch.of(alive, self._request, self._last)
        rows, known = batch.rows, self._known[batch.rows]
        end = self._computed[rows] + batch.num_tokens
        self._computed[rows] = end
        num_decodes, sampled = batch.num_single, batch
        samples = end == known
        if np.count_nonzero(samples) < len(samples):
            num_decodes = int(np.count_nonzero(samples & (batch.num_tokens == 1)))
            sampled, known = batch.of(samples, self._request, self._last), known[samples]
        num_prefill = batch.num_in_all - num_decodes
        kv_tokens = int(np.add.reduce(end if batch.is_single else end * batch.num_readings))
        seconds = self._cost.seconds(num_decodes, num_prefill, kv_tokens, copied)
        seconds = self.draws.step_s(seconds)
        known += 1
        self._known[sampled.rows] = known
        finished: tuple[tuple[Slot, FinishReason], ...] = ()
        is_last = known >= sampled.last
        if np.count_nonzero(is_last):
            last = sampled.rows[is_last]
            self._ended[last] = self._some_have_ended = True
            finished = tuple((Slot(slot), FinishReason.STOP) for slot in last.tolist())
        known *= 104_729
        known += sampled.salt
        known %= VOCAB_SIZE
        idle_s, self.free_s = max(0.0, now_s - self.free_s), now_s + seconds
        self.last_return_s = max(self.last_return_s, self.free_s + half_trip_s)
        completed = StepCompleted(
            now_ns=round(self.last_return_s * 1e9),
            worker_id=self.worker_id,
            step=step,
            slots=sampled.slots,
            token_ids=tuple(known.tolist()),
            finished=finished,
            num_wasted_rows=num_wasted,
            step_us=round(seconds * 1e6),
            total_us=round((self.free_s - arrived_s) * 1e6),
            idle_us=round(idle_s * 1e6),
            operations_done=tuple([op.op_id for op in plan.operations]),
        )
        return Stepped(
            begin_s=now_s,
            end_s=self.free_s,
            completed=completed,
            requests=sampled.requests,
            num_prefill_rows=len(rows) - num_decodes,
            num_decode_rows=num_decodes,
            num_prefill_tokens=num_prefill,
        )

    def _apply(self, plan: StepPlan) -> int:
        """Bytes that its operations copy."""
        changed = bool(plan.changed or plan.releases)
        if plan.reset:
            self._planned.clear()
            changed = True
        for slot in plan.releases:
            self._planned.pop(slot, None)
        for admit in plan.admits:
            slot, number = admit.slot, int.from_bytes(admit.request_id)
            self._known[slot] = len(admit.token_ids)
            self._computed[slot] = admit.num_computed_tokens
            self._last[slot] = admit.prompt_len + self._num_outputs[number]
            self._request[slot] = number
            self._ended[slot] = False
        for slot, count in plan.changed:
            if count:
                self._planned[slot] = count
            else:
                self._planned.pop(slot, None)
        if changed:
            planned = self._planned
            self._batch = _Batch(planned, planned.values(), self._request, self._last)
            self._some_have_ended = bool(self._ended[self._batch.rows].any())
        num_pairs = sum(len(operation.targets) for operation in plan.operations)
        return num_pairs * self._block_bytes


_REPEAT = StepPlan(
    worker_id=WorkerId(""), epoch=0, step=0, based_on_step=0, reset=False, releases=(), admits=(),
    changed=(), growth=(), digest=0, num_scheduled_tokens=0, num_rows=0, num_chunks=0,
)  # fmt: skip
