"""The core's views -> answers for administrators."""

from collections.abc import Mapping

from quire.v1 import common_pb2, scheduler_pb2

from scheduler_svc.core import ready
from scheduler_svc.core.types import PreemptionMode, WorkerId


def encode_snapshot(
    *,
    leader: bool,
    view: ready.CoreView | None,
    stats: ready.CoreStats | None,
    addresses: Mapping[WorkerId, str],
) -> scheduler_pb2.SnapshotResponse:
    """The answer of SchedulerService.Snapshot."""
    response = scheduler_pb2.SnapshotResponse(leader=leader)
    if view is None or stats is None:
        return response
    response.epoch = view.epoch
    response.num_requests_waiting = view.num_waiting
    response.num_requests_running = view.num_running
    response.num_preemptions = stats.num_preemptions
    response.num_recovered = stats.num_recovered
    response.num_requests_swapped = view.num_swapped
    response.num_preemptions_by_swap = stats.preemptions[PreemptionMode.SWAP]
    response.num_preemptions_by_move = stats.preemptions[PreemptionMode.MOVE]
    for worker in view.workers:
        response.workers.add(
            worker_id=worker.worker_id,
            address=addresses.get(worker.worker_id, ""),
            num_requests_running=worker.num_running,
            num_blocks_used=worker.num_blocks_used,
            num_blocks=worker.num_blocks,
            num_steps_in_flight=worker.num_steps_in_flight,
            last_step=worker.last_step,
            draining=worker.draining,
            max_steps_in_flight=worker.max_steps_in_flight,
            round_trip_us=worker.round_trip_us,
            num_requests_swapped=worker.num_swapped,
            num_host_blocks_used=worker.num_host_blocks_used,
            num_host_blocks=worker.num_host_blocks,
        )
    return response


def encode_explanation(found: ready.Explanation) -> scheduler_pb2.ExplainResponse:
    """The answer of SchedulerService.Explain."""
    account, kind = found.account, scheduler_pb2.ExplainResponse
    response = kind(
        state=kind.State.Value(f"STATE_{found.state.name}"),
        attempt=found.attempt,
        worker_id=found.worker_id or "",
        num_before=found.place,
        num_prompt_tokens=found.num_prompt_tokens,
        num_output_tokens=found.num_output_tokens,
        num_computed_tokens=found.num_computed_tokens,
        num_cached_tokens=found.num_cached_tokens,
        age_us=(found.now_ns - found.arrived_ns) // 1000,
        num_preemptions=found.num_preemptions,
        preempted_us=account.preempted_ns // 1000,
        num_moves=account.num_moves,
        set_back_us=account.set_back_ns // 1000,
        num_skips=account.num_skips,
        num_swaps=account.num_swaps,
    )
    for wait, duration_ns in account.waited:
        response.waits.add(
            reason=kind.Reason.Value(f"REASON_{wait.name}"), duration_us=duration_ns // 1000
        )
    if account.prefix_stop is not None:
        response.prefix_stop = kind.PrefixStop.Value(f"PREFIX_STOP_{account.prefix_stop.name}")
    if found.finish is not None:
        response.finish_reason = common_pb2.FinishReason.ValueType(found.finish.value)
    return response
