"""Views of the core: counts, and explanations of where a request stands and its time went."""

from collections import OrderedDict
from collections.abc import Collection

from scheduler_svc.core.account import Account
from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.ready import CoreView, Explanation, Finish, Glance
from scheduler_svc.core.request import Request
from scheduler_svc.core.types import FinishReason, RequestId
from scheduler_svc.core.worker_state import WorkerState

# Ended requests that can still be explained; the oldest are forgotten.
MAX_ENDED = 4096


class EndedRequests:
    """The last MAX_ENDED ends."""

    def __init__(self, *, max_ended: int = MAX_ENDED) -> None:
        self._max_ended = max_ended
        # The first entry of a plain dict is found behind all that have been taken out before it.
        self._ended: OrderedDict[RequestId, Finish] = OrderedDict()

    def note(self, finish: Finish) -> None:
        """A request has ended; its last end counts."""
        self._ended.pop(finish.request_id, None)
        self._ended[finish.request_id] = finish
        if len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def explain(self, request_id: RequestId) -> Explanation | None:
        """None for one that is not remembered."""
        finish = self._ended.get(request_id)
        return None if finish is None else _ended(finish)


def glance(num_requests: int, workers: Collection[WorkerState], worker: WorkerState) -> Glance:
    """One of the workers between two events, without what it costs to look at them all."""
    num_held = sum([len(w.running) + len(w.swap.swapped) for w in workers])
    return Glance(num_waiting=num_requests - num_held, worker=worker.view())


def core_view(
    epoch: int, num_requests: int, num_total_tokens: int, workers: Collection[WorkerState]
) -> CoreView:
    """The core between two events; num_total_tokens are prompt and max_tokens of its requests."""
    num_running = sum(len(worker.running) for worker in workers)
    num_swapped = sum(len(worker.swap.swapped) for worker in workers)
    num_computed = sum(int(w.rows.num_computed[w.order].sum()) for w in workers)
    num_computed += sum(s.num_computed for w in workers for s in w.swap.swapped.values())
    return CoreView(
        epoch=epoch,
        num_waiting=num_requests - num_running - num_swapped,
        num_running=num_running,
        num_swapped=num_swapped,
        backlog_tokens=num_total_tokens - num_computed,
        workers=tuple(worker.view() for worker in workers),
    )


def held(
    request: Request,
    *,
    place: int | None,
    worker: WorkerState | None,
    now_ns: int,
    account: Account,
) -> Explanation:
    """A request that has not ended, and its worker."""
    return Explanation(
        request_id=request.request_id,
        state=request.state,
        attempt=request.attempt,
        worker_id=request.worker_id,
        place=place,
        num_prompt_tokens=request.prompt_len,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=0 if worker is None else worker.num_computed(request),
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        arrived_ns=request.arrived_ns,
        now_ns=now_ns,
        account=account,
    )


def why_never(request: Request, workers: Collection[WorkerState]) -> str | None:
    """Why the request fits on no worker, with the numbers of the one that has most blocks.

    None if it could run to its last token alone on one of them, or if there are none.
    """
    for worker in workers:
        if request.max_total_tokens <= worker.max_request_tokens:
            return None
    if not workers:
        return None
    largest = max(workers, key=lambda worker: worker.pool.num_blocks)
    return (
        f"prompt ({request.prompt_len}) + max_tokens ({request.sampling.max_tokens}) need "
        f"{largest.blocks_for(request.max_total_tokens - 1)} KV blocks of "
        f"{largest.capacity.block_size} tokens; the largest worker has "
        f"{largest.pool.num_blocks} and a context of {largest.capacity.max_model_len}"
    )


def end(
    request: Request,
    reason: FinishReason,
    notify: bool,
    message: str,
    now_ns: int,
    account: Account,
) -> Finish:
    """A request's end."""
    return Finish(
        request_id=request.request_id,
        entry_id=request.entry_id,
        attempt=request.attempt,
        gateway_id=request.gateway_id,
        reason=reason,
        notify=notify,
        message=message,
        num_prompt_tokens=request.prompt_len,
        num_output_tokens=len(request.token_ids) - request.prompt_len,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        arrived_ns=request.arrived_ns,
        first_scheduled_ns=request.first_scheduled_ns,
        first_token_ns=request.first_token_ns,
        finished_ns=now_ns,
        account=account,
    )


def _ended(finish: Finish) -> Explanation:
    return Explanation(
        request_id=finish.request_id,
        state=RequestState.FINISHED,
        attempt=finish.attempt,
        num_prompt_tokens=finish.num_prompt_tokens,
        num_output_tokens=finish.num_output_tokens,
        num_cached_tokens=finish.num_cached_tokens,
        num_preemptions=finish.num_preemptions,
        arrived_ns=finish.arrived_ns,
        now_ns=finish.finished_ns,
        account=finish.account,
        finish=finish.reason,
    )
