"""How a request loses its blocks to others, and how its work comes back from host memory.

Rules:

- a victim that another worker has room for moves there; else the policy chooses between copying
  what it computed to host blocks and computing it anew;
- of a swapped request's blocks the first ones, cached and shared, are not copied but looked up
  again; if they are gone when its turn has come and none that is on its way back brings them, or a
  step that was to compute the rest failed, the swap is void and it begins anew;
- swapped requests come back in their turn, once the copy is done (then their steps have returned)
  and there is room with a margin; the first that can't come back holds up those after it, and
  whatever waits after it;
- a request takes its slot when the copy back is done; until then it holds its table only.
"""

from collections.abc import Callable, Iterable

from scheduler_svc.core import plan_size, planner, policy
from scheduler_svc.core.account import Wait
from scheduler_svc.core.admission import Admission
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.planner import StepBudget
from scheduler_svc.core.ready import CoreStats, Preemption
from scheduler_svc.core.request import Request
from scheduler_svc.core.sharing import PrefixSharing
from scheduler_svc.core.swap import Swapped
from scheduler_svc.core.types import BlockId, OperationKind, PreemptionMode
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.core.worker_state import WorkerState


class Preemptions:
    """Takes requests off workers and brings swapped ones back. `start_anew` ends a swap in vain."""

    def __init__(
        self,
        *,
        config: CoreConfig,
        stats: CoreStats,
        sharing: PrefixSharing,
        waiting: WaitingQueue,
        admission: Admission,
        start_anew: Callable[[WorkerState, Request, bool], None],
    ) -> None:
        self._config = config
        self._stats = stats
        self._sharing = sharing
        self._waiting = waiting
        self._admission = admission
        self._start_anew = start_anew

    # Out

    def preempt(self, worker: WorkerState, request: Request, now_ns: int) -> None:
        """Takes a running request's slot and blocks."""
        num_computed, first, last = self._swappable(worker, request)
        num_blocks = last - first
        cost = policy.preemption_cost(
            num_bytes=num_blocks * worker.capacity.block_bytes,
            num_uncached=max(0, num_computed - first * worker.capacity.block_size),
            cost=worker.cost.profile,
            swap_gb_per_s=self._config.swap_gbps_override,
            token_us=self._config.prefill_us_per_token_override,
        )
        mode = PreemptionMode.RECOMPUTE
        if self._fits_elsewhere(worker, request):
            mode = PreemptionMode.MOVE
        elif 0 < num_blocks <= worker.swap.host.num_free and worker.swap.may_move(num_blocks):
            mode = policy.choose_preemption(
                self._config.preemption_mode, cost, last=worker.last_preemption
            )
            worker.last_preemption = mode
        is_swap = mode is PreemptionMode.SWAP
        request.num_preemptions += 1
        request.num_swaps += is_swap
        self._stats.preemptions[mode] += 1
        worker.preemptions.append(
            Preemption(
                request_id=request.request_id,
                mode=mode,
                swap_us=_whole(cost.swap_us),
                recompute_us=_whole(cost.recompute_us),
                num_blocks=num_blocks if is_swap else 0,
            )
        )
        if is_swap:
            self._swap_out(worker, request, num_computed, first, last, now_ns)
        else:
            self._start_anew(worker, request, True)

    def _swappable(self, worker: WorkerState, request: Request) -> tuple[int, int, int]:
        """Tokens whose KV a swap would keep, and which blocks of the table would be copied.

        None of them where the request has nothing left to plan, where the worker would have to
        repeat tokens for their logprobs, or where it is a suspect, which comes back by admission
        only.
        """
        rows, slot = worker.rows, request.slot
        num_computed = int(rows.num_computed[slot])
        first = worker.pool.num_shared(request.blocks[: worker.blocks_for(num_computed)])
        unscored = num_computed
        if request.sampling.num_logprobs is not None and rows.is_unsampled(slot):
            unscored = request.num_unscored(worker.session)
        is_over = rows.num_tokens[slot] >= rows.limit[slot]
        if is_over or unscored < num_computed or request.still_suspect():
            return num_computed, first, first
        return num_computed, first, max(first, worker.blocks_for(num_computed))

    def _fits_elsewhere(self, worker: WorkerState, request: Request) -> bool:
        """Whether another worker has room for all of the request now."""
        num_tokens = int(worker.rows.num_tokens[request.slot])
        return any(
            other is not worker
            and not other.draining
            and self._admission.most(other) > 0
            and not self._admission.is_barred(other, request)
            and planner.fits(other, self._config, num_tokens)
            for other in self._admission.eligible(request)
        )

    def _swap_out(
        self,
        worker: WorkerState,
        request: Request,
        num_computed: int,
        first: int,
        last: int,
        now_ns: int,
    ) -> None:
        host_blocks = worker.swap.host.allocate(last - first)
        assert host_blocks is not None, "the mode was chosen for host blocks that are not there"
        table = request.blocks
        request.blocks = table[:first] + table[last:]
        worker.vacate(request)
        request.blocks, request.num_published = [], 0
        copied = table[first:last]
        op_id = worker.operate(OperationKind.SWAP_OUT, copied, host_blocks)
        worker.swap.begin_out(
            Swapped(
                request=request, num_computed=num_computed, first=first, host_blocks=host_blocks
            ),
            op_id,
            worker.last_step + 1,
            copied,
        )
        self._stats.num_blocks_swapped_out += len(copied)
        request.set_back(now_ns, preempted=True)
        request.waits.turn_to(Wait.SWAPPED, now_ns)

    # What becomes of operations and steps

    def operations_done(self, worker: WorkerState, op_ids: Iterable[int]) -> None:
        """The worker has done these."""
        for op_id in op_ids:
            worker.swap.done(op_id)

    def forget_unfinished(self, worker: WorkerState) -> None:
        """No operation goes on: a swap that needed one is void."""
        for op_id in list(worker.swap.transfers):
            swapped = worker.swap.done(op_id)
            if swapped is not None:
                self._void(worker, swapped.request)

    def row_returned(self, worker: WorkerState, request: Request, *, is_whole: bool) -> None:
        """A step that had a row of a swapped request has returned, or never will: not whole."""
        request.num_in_flight -= 1
        if not is_whole:
            self._void(worker, request)

    def _void(self, worker: WorkerState, request: Request) -> None:
        self._stats.num_swaps_void += 1
        self._start_anew(worker, request, True)

    # Back

    def bring_back(
        self, worker: WorkerState, budget: StepBudget, now_ns: int, *, is_short: bool
    ) -> None:
        """Seats requests whose blocks are there; lets others begin to come if nothing is short."""
        turns = sorted(
            worker.swap.swapped.values(),
            key=lambda swapped: policy.turn(self._config.scheduling_policy, swapped.request),
        )
        for swapped in turns:
            is_here = not swapped.is_out and swapped.op_id is None
            if is_here and worker.num_admit_bytes < plan_size.ADMIT_BYTES:
                self._seat(worker, budget, swapped, now_ns)
        for swapped in turns if not is_short else ():
            if swapped.is_out and not self._begins_to_come(worker, budget, swapped, now_ns):
                break

    def _begins_to_come(
        self, worker: WorkerState, budget: StepBudget, swapped: Swapped, now_ns: int
    ) -> bool:
        """Whether the request has left its place among those that are out."""
        request, pool = swapped.request, worker.pool
        if swapped.op_id is not None:
            return False
        assert request.num_in_flight == 0, "an operation is done before the steps that precede it"
        if not planner.has_seat(worker, self._config) or not self._may_lead(worker, request):
            return False
        if not worker.swap.may_move(len(swapped.host_blocks)):
            return False
        if worker.num_admit_bytes >= plan_size.ADMIT_BYTES:
            return False
        num_changes = pool.num_released + worker.num_prompt_blocks
        if swapped.had_no_room_at == num_changes:
            return False
        cached = self._sharing.match(request, worker).blocks
        num_cached = len(cached)
        if num_cached < swapped.first:
            if worker.is_coming(request.block_hashes[num_cached : swapped.first]):
                swapped.had_no_room_at = num_changes
                return False
            self._void(worker, request)
            return True
        num_new = worker.blocks_for(len(request.token_ids)) - num_cached
        margin = policy.return_margin(num_running=worker.num_seats, watermark=worker.watermark)
        if pool.num_free - pool.num_free_among(cached) - num_new < margin:
            swapped.had_no_room_at = num_changes
            return False
        pool.share(cached)
        fresh = pool.allocate(num_new)
        assert fresh is not None, "room was counted that is not there"
        request.blocks, request.num_published = cached + fresh, num_cached
        self._copy_back(worker, swapped, num_cached)
        if swapped.op_id is None:
            self._seat(worker, budget, swapped, now_ns)
        return True

    def _copy_back(self, worker: WorkerState, swapped: Swapped, num_cached: int) -> None:
        """Fills what the cache has not given. Host blocks that are of no use are free at once."""
        num_useless = min(num_cached - swapped.first, len(swapped.host_blocks))
        useless, needed = swapped.host_blocks[:num_useless], swapped.host_blocks[num_useless:]
        worker.swap.host.release(useless)
        swapped.host_blocks = needed
        swapped.num_computed = max(swapped.num_computed, num_cached * worker.capacity.block_size)
        if not needed:
            return
        targets: list[BlockId] = swapped.request.blocks[num_cached : num_cached + len(needed)]
        op_id = worker.operate(OperationKind.SWAP_IN, needed, targets)
        worker.swap.begin_in(swapped, op_id, worker.last_step + 1, targets)
        self._stats.num_blocks_swapped_in += len(needed)

    def _seat(self, worker: WorkerState, budget: StepBudget, swapped: Swapped, now_ns: int) -> None:
        """The request runs again from where it was."""
        request = swapped.request
        worker.swap.leave(request)
        self._admission.seat(
            request, worker, blocks=request.blocks, num_computed=swapped.num_computed, now_ns=now_ns
        )
        budget.take(request.slot, worker.rows.num_wanted(request.slot))

    def _may_lead(self, worker: WorkerState, request: Request) -> bool:
        """With `fair` a request comes back only while its tenant does not lead one that waits."""
        if self._config.scheduling_policy != "fair":
            return True
        least = min(
            (
                head.tenant.counter
                for head in self._waiting.heads()
                if worker in self._admission.eligible(head)
            ),
            default=float("inf"),
        )
        return policy.may_lead(
            counter=request.tenant.counter, least=least, max_lead=worker.capacity.max_model_len
        )


def _whole(duration_us: float | None) -> int | None:
    return None if duration_us is None else round(duration_us)
