"""A worker that costs time and computes nothing: columns by slot, as the core keeps them.

Modelled, all of it: plans are taken as they come and not checked (the world does that). A step's
copies of blocks are waited for. A request gives its tokens until its length is reached. Plans and
results overtake nobody, however their ways scatter.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from scheduler_svc.core.events import StepCompleted, WorkerJoined
from scheduler_svc.core.ready import StepPlan
from scheduler_svc.core.types import FinishReason, Slot, WorkerId
from scheduler_svc.sim.cost import QUERY_TILE, StepCost
from scheduler_svc.sim.scatter import Draws

VOCAB_SIZE = 50_000


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
        self._active = np.zeros(0, np.int64)
        self._num_tokens = np.zeros(0, np.int64)

    def take(self, plan: StepPlan, arrives_s: float) -> None:
        """Queues a plan, each of its steps singly."""
        if self.plans:
            arrives_s = max(arrives_s, self.plans[-1][0])
        self.plans.append((arrives_s, plan))
        for _ in range(plan.num_steps - 1):
            self.plans.append((arrives_s, _REPEAT))

    def compute(self, step: int, now_s: float) -> Stepped:
        """The next step, begun now; its worker is free at its end."""
        arrived_s, plan = self.plans.popleft()
        copied = 0 if plan is _REPEAT else self._apply(plan)
        rows, num_tokens = self._active, self._num_tokens
        alive = ~self._ended[rows]
        num_wasted = len(rows) - int(np.count_nonzero(alive))
        if num_wasted:
            rows, num_tokens = rows[alive], num_tokens[alive]
        start = self._computed[rows]
        end = start + num_tokens
        self._computed[rows] = end
        samples = end == self._known[rows]
        sampled = rows if samples.all() else rows[samples]
        is_decode = num_tokens == 1
        num_decodes = int(np.count_nonzero(is_decode & samples))
        num_prefill = int(num_tokens.sum()) - num_decodes
        kv_tokens = int((-(-num_tokens // QUERY_TILE) * end).sum())
        seconds = self._cost.seconds(num_decodes, num_prefill, kv_tokens, copied)
        seconds = self.draws.step_s(seconds)
        self._known[sampled] += 1
        known, requests = self._known[sampled], self._request[sampled]
        is_last = known >= self._last[sampled]
        finished: tuple[tuple[Slot, FinishReason], ...] = ()
        if is_last.any():
            last = sampled[is_last]
            self._ended[last] = True
            finished = tuple((Slot(slot), FinishReason.STOP) for slot in last.tolist())
        tokens = (requests * 7919 + known * 104_729) % VOCAB_SIZE
        idle_s, self.free_s = max(0.0, now_s - self.free_s), now_s + seconds
        completed = StepCompleted(
            now_ns=0,
            worker_id=self.worker_id,
            step=step,
            slots=cast(tuple[Slot, ...], tuple(sampled.tolist())),
            token_ids=tuple(tokens.tolist()),
            finished=finished,
            num_wasted_rows=num_wasted,
            step_us=round(seconds * 1e6),
            total_us=round((self.free_s - arrived_s) * 1e6),
            idle_us=round(idle_s * 1e6),
            operations_done=tuple(op.op_id for op in plan.operations),
        )
        return Stepped(
            begin_s=now_s,
            end_s=self.free_s,
            completed=completed,
            requests=requests.tolist(),
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
            self._active = np.fromiter(self._planned, np.int64, len(self._planned))
            self._num_tokens = np.fromiter(self._planned.values(), np.int64, len(self._planned))
        num_pairs = sum(len(operation.targets) for operation in plan.operations)
        return num_pairs * self._block_bytes


_REPEAT = StepPlan(
    worker_id=WorkerId(""), epoch=0, step=0, based_on_step=0, reset=False, releases=(), admits=(),
    changed=(), growth=(), digest=0, num_scheduled_tokens=0, num_rows=0, num_chunks=0,
)  # fmt: skip
