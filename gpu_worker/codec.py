"""Between messages of quire.v1 and the worker's values; the only module that knows both."""

import itertools
import math
from collections.abc import Sequence

from quire.v1 import common_pb2, queue_pb2, worker_pb2

from gpu_worker.messages import (
    Acknowledge,
    Admit,
    CancelRow,
    Cancels,
    Draining,
    Fault,
    Heartbeat,
    Open,
    SessionMessage,
    Snapshot,
    StepPlan,
    StepResult,
    Subscribe,
    Subscriptions,
    TokenBatch,
    TokenLogprobs,
    TokensMessage,
)
from gpu_worker.ports import Operation, RunnerInfo, SamplingSpec


class UnknownMessageError(Exception):
    """A message says nothing that this revision knows."""


def session_request(message: worker_pb2.SessionRequest) -> Open | StepPlan:
    """Raises UnknownMessageError."""
    match message.WhichOneof("kind"):
        case "plan":
            return step_plan(message.plan)
        case "open":
            opening = message.open
            return Open(
                epoch=opening.epoch,
                min_schema_revision=opening.min_schema_revision,
                max_schema_revision=opening.max_schema_revision,
                last_result_step=opening.last_result_step,
                incarnation=opening.incarnation,
            )
        case _:
            raise UnknownMessageError("a SessionRequest without a known kind")


def step_plan(plan: worker_pb2.StepPlan) -> StepPlan:
    """Total: what makes no sense is for the replica to refuse."""
    return StepPlan(
        epoch=plan.epoch,
        step=plan.step,
        num_steps=plan.num_steps,
        reset=plan.reset,
        release_slots=tuple(plan.release_slots),
        admits=tuple(_admit(admit) for admit in plan.admits),
        changed_slots=tuple(plan.changed_slots),
        changed_num_tokens=tuple(plan.changed_num_tokens),
        grow_slots=tuple(plan.grow_slots),
        grow_block_ids=tuple(plan.grow_block_ids),
        digest=plan.digest,
        operations=tuple(
            Operation(
                op_id=operation.op_id,
                kind=operation.kind,
                group=operation.group,
                source_blocks=tuple(operation.source_blocks),
                target_blocks=tuple(operation.target_blocks),
            )
            for operation in plan.operations
        ),
    )


def _admit(admit: worker_pb2.Admit) -> Admit:
    known = (worker_pb2.Admit.KIND_UNSPECIFIED, worker_pb2.Admit.KIND_GENERATE)
    sampling = admit.sampling
    return Admit(
        slot=admit.slot,
        generation=admit.generation,
        request_id=admit.request_id,
        attempt=admit.attempt,
        reply_to=admit.reply_to,
        token_ids=tuple(admit.token_ids),
        prompt_len=admit.prompt_len,
        emit_from=admit.emit_from,
        num_computed_tokens=admit.num_computed_tokens,
        num_cached_tokens=admit.num_cached_tokens,
        block_ids=tuple(admit.block_ids),
        sampling=SamplingSpec(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            stop_token_ids=tuple(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            sample_index=admit.sample_index,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty or 1.0,
            logit_bias=_logit_bias(sampling),
            num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
            prompt_logprobs=sampling.prompt_logprobs,
        ),
        generates=admit.kind in known,
    )


def _logit_bias(sampling: common_pb2.SamplingParams) -> tuple[tuple[int, float], ...]:
    """Pairs; one that lacks its half is given an id or a bias that the replica refuses."""
    if not sampling.logit_bias_token_ids and not sampling.logit_biases:
        return ()
    columns = itertools.zip_longest(sampling.logit_bias_token_ids, sampling.logit_biases)
    return tuple(
        (-1 if token is None else token, math.nan if bias is None else bias)
        for token, bias in columns
    )


def refused(highest_epoch: int) -> worker_pb2.SessionResponse:
    """Answer to an Open of an older epoch."""
    return worker_pb2.SessionResponse(refused=worker_pb2.Refused(highest_epoch=highest_epoch))


def hello(
    *,
    worker_id: str,
    incarnation: int,
    schema_revision: int,
    info: RunnerInfo,
    last_applied_step: int,
    first_result_step: int,
) -> worker_pb2.SessionResponse:
    """First message of an accepted session."""
    group = info.cache_group
    kind = worker_pb2.CacheGroup.KIND_SLIDING_WINDOW if group.window else (
        worker_pb2.CacheGroup.KIND_FULL
    )  # fmt: skip
    return worker_pb2.SessionResponse(
        hello=worker_pb2.Hello(
            min_schema_revision=schema_revision,
            max_schema_revision=schema_revision,
            worker_id=worker_id,
            incarnation=incarnation,
            model_digest=info.model_digest,
            cache_groups=[
                worker_pb2.CacheGroup(
                    kind=kind,
                    window=group.window,
                    block_size=group.block_size,
                    block_bytes=group.block_bytes,
                    num_device_blocks=group.num_blocks,
                    num_host_blocks=group.num_host_blocks,
                )
            ],
            num_slots=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            parallelism=worker_pb2.Parallelism(tensor_parallel_size=1, pipeline_parallel_size=1),
            cost=worker_pb2.CostProfile(
                step_us=info.step_us,
                token_us=info.token_us,
                swap_out_gb_per_s=info.swap_out_gb_per_s,
                swap_in_gb_per_s=info.swap_in_gb_per_s,
            ),
            last_applied_step=last_applied_step,
            first_result_step=first_result_step,
        )
    )


def session_response(message: SessionMessage) -> worker_pb2.SessionResponse:
    """Everything of a session after Hello."""
    match message:
        case StepResult():
            return worker_pb2.SessionResponse(result=step_result(message))
        case Heartbeat():
            beat = worker_pb2.Heartbeat(last_step=message.last_step, busy=message.busy)
            return worker_pb2.SessionResponse(heartbeat=beat)
        case Subscriptions():
            gateways = worker_pb2.Subscriptions(gateway_ids=message.gateway_ids)
            return worker_pb2.SessionResponse(subscriptions=gateways)
        case Cancels():
            cancels = worker_pb2.Cancels(request_ids=message.request_ids)
            return worker_pb2.SessionResponse(cancels=cancels)
        case Draining():
            return worker_pb2.SessionResponse(draining=worker_pb2.Draining())
        case Snapshot():
            return worker_pb2.SessionResponse(snapshot=_snapshot(message))


def step_result(result: StepResult) -> worker_pb2.StepResult:
    """A result with its columns."""
    times = result.times
    return worker_pb2.StepResult(
        epoch=result.epoch,
        step=result.step,
        slots=result.slots,
        token_ids=result.token_ids,
        finished_slots=result.finished_slots,
        finish_reasons=_reasons(result.finish_reasons),
        num_wasted_rows=result.num_wasted_rows,
        times=worker_pb2.StepTimes(
            idle_us=_u32(times.idle_us),
            apply_us=_u32(times.apply_us),
            forward_us=_u32(times.forward_us),
            sample_us=_u32(times.sample_us),
            total_us=_u32(times.total_us),
        ),
        faults=[_fault(fault) for fault in result.faults],
        digest=result.digest,
        operations_done=result.operations_done,
    )


def _u32(value: int) -> int:
    return min(max(value, 0), 2**32 - 1)


def _reasons(reasons: Sequence[int]) -> list[common_pb2.FinishReason.ValueType]:
    return [common_pb2.FinishReason.ValueType(reason) for reason in reasons]


def _fault(fault: Fault) -> worker_pb2.Fault:
    return worker_pb2.Fault(
        scope=worker_pb2.Fault.Scope.ValueType(fault.scope),
        code=worker_pb2.Fault.Code.ValueType(fault.code),
        slot=fault.slot,
        message=fault.message,
        retryable=fault.retryable,
    )


def _snapshot(snapshot: Snapshot) -> worker_pb2.Snapshot:
    return worker_pb2.Snapshot(
        slots=[
            worker_pb2.SlotState(
                slot=state.slot,
                generation=state.generation,
                request_id=state.request_id,
                attempt=state.attempt,
                num_computed_tokens=state.num_computed_tokens,
                num_output_tokens=state.num_output_tokens,
            )
            for state in snapshot.slots
        ],
        recent_finishes=[
            worker_pb2.FinishedRequest(
                request_id=finish.request_id,
                attempt=finish.attempt,
                finish_reason=common_pb2.FinishReason.ValueType(finish.finish_reason),
            )
            for finish in snapshot.recent_finishes
        ],
        gateway_ids=snapshot.gateway_ids,
        last=snapshot.last,
    )


def tokens_request(message: worker_pb2.TokensRequest) -> TokensMessage:
    """Raises UnknownMessageError."""
    match message.WhichOneof("kind"):
        case "acknowledge":
            return Acknowledge(sequence=message.acknowledge.sequence)
        case "cancel":
            return CancelRow(request_id=message.cancel.request_id)
        case "subscribe":
            subscribe = message.subscribe
            return Subscribe(
                gateway_id=subscribe.gateway_id,
                reply_to=subscribe.reply_to,
                incarnation=subscribe.incarnation,
                last_sequence=subscribe.last_sequence,
            )
        case _:
            raise UnknownMessageError("a TokensRequest without a known kind")


def subscribed(*, incarnation: int, gap: bool) -> worker_pb2.TokensResponse:
    """First message of a Tokens stream."""
    return worker_pb2.TokensResponse(
        subscribed=worker_pb2.Subscribed(incarnation=incarnation, gap=gap)
    )


def token_batch(sequence: int, batch: TokenBatch) -> worker_pb2.TokensResponse:
    """A batch with its place in the outbox."""
    return worker_pb2.TokensResponse(
        batch=worker_pb2.TokenBatch(
            sequence=sequence,
            step=batch.step,
            request_ids=b"".join(batch.request_ids),
            attempts=batch.attempts,
            first_positions=batch.first_positions,
            num_tokens=batch.num_tokens,
            token_ids=batch.token_ids,
            finish_reasons=_reasons(batch.finish_reasons),
            num_cached_tokens=batch.num_cached_tokens,
            logprobs=[_token_logprobs(entry) for entry in batch.logprobs],
        )
    )


def _token_logprobs(entry: TokenLogprobs) -> worker_pb2.TokenLogprobs:
    return worker_pb2.TokenLogprobs(
        entry=entry.entry,
        num_prompt_rows=entry.num_prompt_rows,
        logprobs=entry.logprobs,
        num_top=entry.num_top,
        top_token_ids=entry.top_token_ids,
        top_logprobs=entry.top_logprobs,
    )


def worker_record(*, worker_id: str, incarnation: int, address: str, info: RunnerInfo) -> bytes:
    """Value of the worker's registry key."""
    return queue_pb2.WorkerRecord(
        worker_id=worker_id,
        incarnation=incarnation,
        address=address,
        model_digest=info.model_digest,
        max_model_len=info.max_model_len,
    ).SerializeToString()
