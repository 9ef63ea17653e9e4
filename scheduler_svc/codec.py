"""Generated messages <-> the scheduler's dataclasses, for the queue and the workers' sessions.

With admin_codec, which answers administrators, the only module that knows both.

Everything from outside is checked here: what leaves this module is safe to feed to the core.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import assert_never

from google.protobuf.message import DecodeError
from quire.v1 import common_pb2, operations_pb2, queue_pb2, worker_pb2

from scheduler_svc import limits
from scheduler_svc.core import ready
from scheduler_svc.core.events import RequestArrived
from scheduler_svc.core.types import (
    CostProfile,
    FaultScope,
    FinishReason,
    RequestId,
    SamplingSpec,
    Slot,
    WorkerCapacity,
    WorkerId,
)
from scheduler_svc.ports import (
    Cancels,
    Draining,
    FaultReport,
    Heartbeat,
    Hello,
    Notice,
    Refused,
    SnapshotChunk,
    StepReport,
    Subscriptions,
    WorkerMessage,
    WorkerRecord,
)

SCHEMA_REVISION = 1
KNOWN_FEATURES: frozenset[str] = frozenset()
MAX_TOKEN_ID = 2**31 - 1
_MAX_NAME_BYTES = 256
_MAX_STOP_TOKENS = 4096
_MAX_LOGIT_BIASES = 1024
_MAX_NUM_LOGPROBS = 20
_TENANT_WEIGHTS = (1e-3, 1e6)
# Of one prompt, with those of its most likely tokens: they leave the worker in one message.
MAX_PROMPT_LOGPROBS = 2**20
_FINISH = {reason.value: reason for reason in FinishReason}
_GENERATE = worker_pb2.Admit.KIND_GENERATE


class MalformedError(Exception):
    """A message that breaks the contract; the text says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelEntry:
    """A queue entry that ends a request."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class BadEntry:
    """A queue entry that can't be scheduled. `notice` is None if nobody can be told."""

    problem: str
    notice: Notice | None


# Queue


def decode_entry(
    fields: Mapping[bytes, bytes],
    *,
    entry_id: str,
    now_ns: int,
    to_deadline_ns: Callable[[int], int],
) -> RequestArrived | CancelEntry | BadEntry:
    """One entry of the request stream. Never raises for what the entry holds.

    to_deadline_ns turns Redis milliseconds into the clock of now_ns.
    """
    raw = fields.get(b"entry")
    if raw is None:
        return BadEntry(problem="no field `entry`", notice=None)
    try:
        entry = queue_pb2.QueueEntry.FromString(raw)
    except DecodeError:
        return BadEntry(problem="not a QueueEntry", notice=None)
    kind = entry.WhichOneof("kind")
    if kind == "cancel":
        request_id = entry.cancel.request_id
        if len(request_id) != 16:
            return BadEntry(problem="request_id must have 16 bytes", notice=None)
        return CancelEntry(request_id=RequestId(request_id))
    if kind != "request":
        return BadEntry(problem="neither a request nor a cancel", notice=None)
    request = entry.request
    try:
        deadline_ns = to_deadline_ns(_deadline_ms(fields.get(b"deadline_ms", b"")))
        return _arrival(request, entry_id, deadline_ns, now_ns)
    except MalformedError as error:
        return BadEntry(problem=str(error), notice=_rejection(request, str(error)))


def _arrival(
    request: queue_pb2.QueuedRequest, entry_id: str, deadline_ns: int, now_ns: int
) -> RequestArrived:
    _require(len(request.request_id) == 16, "request_id must have 16 bytes")
    _require(1 <= request.attempt <= MAX_TOKEN_ID, "attempt must be at least 1")
    _require(_good_name(request.gateway_id), "gateway_id must have 1 to 256 bytes")
    _require(len(request.reply_to) == 16, "reply_to must have 16 bytes")
    unknown = sorted(set(request.required_features) - KNOWN_FEATURES)
    _require(not unknown, "required features are not known here: " + ", ".join(unknown)[:200])
    _require(len(request.cache_salt) <= _MAX_NAME_BYTES, "cache_salt must have at most 256 bytes")
    _require(len(request.traceparent) <= _MAX_NAME_BYTES, "traceparent is too long")
    _require(len(request.tenant.encode()) <= _MAX_NAME_BYTES, "tenant must have at most 256 bytes")
    weight, (lowest, highest) = request.tenant_weight or 1.0, _TENANT_WEIGHTS
    _require(lowest <= weight <= highest, "tenant_weight must be 0 or from 0.001 to 1000000")
    _require(len(request.sample_group) in (0, 16), "sample_group must have 0 or 16 bytes")
    prompt, output = tuple(request.prompt_token_ids), tuple(request.output_token_ids)
    _require(len(prompt) >= 1, "prompt_token_ids must not be empty")
    _require(max(prompt) <= MAX_TOKEN_ID, "prompt_token_ids must be below 2^31")
    _require(not output or max(output) <= MAX_TOKEN_ID, "output_token_ids must be below 2^31")
    _require(request.HasField("sampling"), "sampling is missing")
    sampling = _sampling(request.sampling)
    _require(len(output) < sampling.max_tokens, "output_token_ids reach max_tokens already")
    if sampling.prompt_logprobs:
        num_logprobs = len(prompt) * (1 + (sampling.num_logprobs or 0))
        _require(
            num_logprobs <= MAX_PROMPT_LOGPROBS,
            f"prompt_logprobs of {len(prompt)} tokens, {sampling.num_logprobs} likely ones each, "
            f"are {num_logprobs} values; {MAX_PROMPT_LOGPROBS} are allowed",
        )
    return RequestArrived(
        now_ns=now_ns,
        request_id=RequestId(request.request_id),
        entry_id=entry_id,
        attempt=request.attempt,
        gateway_id=request.gateway_id,
        reply_to=request.reply_to,
        prompt_token_ids=prompt,
        output_token_ids=output,
        sampling=sampling,
        priority=request.priority,
        deadline_ns=deadline_ns,
        cache_salt=request.cache_salt,
        traceparent=request.traceparent,
        tenant=request.tenant,
        tenant_weight=weight,
        sample_index=request.sample_index,
        sample_group=request.sample_group,
    )


def _deadline_ms(raw: bytes) -> int:
    # Redis milliseconds have 13 digits until the year 2286.
    _require(raw.isdigit() and 1 <= len(raw) <= 15, "deadline_ms must be Redis time in ms")
    return int(raw)


def _sampling(params: common_pb2.SamplingParams) -> SamplingSpec:
    _require(1 <= params.max_tokens <= MAX_TOKEN_ID, "max_tokens must be from 1 to 2^31-1")
    good = math.isfinite(params.temperature) and params.temperature >= 0.0
    _require(good, "temperature must be finite and not negative")
    _require(0.0 < params.top_p <= 1.0, "top_p must be in (0, 1]")
    _require(params.top_k <= MAX_TOKEN_ID, "top_k must be below 2^31")
    _require(params.min_tokens <= params.max_tokens, "min_tokens must not exceed max_tokens")
    stops = tuple(params.stop_token_ids)
    _require(len(stops) <= _MAX_STOP_TOKENS, "too many stop_token_ids")
    _require(not stops or max(stops) <= MAX_TOKEN_ID, "stop_token_ids must be below 2^31")
    _require(0.0 <= params.min_p <= 1.0, "min_p must be in [0, 1]")
    _require(-2.0 <= params.presence_penalty <= 2.0, "presence_penalty must be from -2 to 2")
    _require(-2.0 <= params.frequency_penalty <= 2.0, "frequency_penalty must be from -2 to 2")
    good = math.isfinite(params.repetition_penalty) and params.repetition_penalty >= 0.0
    _require(good, "repetition_penalty must be finite and not negative")
    num_logprobs = params.num_logprobs if params.HasField("num_logprobs") else None
    _require((num_logprobs or 0) <= _MAX_NUM_LOGPROBS, "num_logprobs must be from 0 to 20")
    good = num_logprobs is not None or not params.prompt_logprobs
    _require(good, "prompt_logprobs needs num_logprobs")
    return SamplingSpec(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        stop_token_ids=stops,
        min_tokens=params.min_tokens,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        logit_bias=_logit_bias(params),
        num_logprobs=num_logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def _logit_bias(params: common_pb2.SamplingParams) -> tuple[tuple[int, float], ...]:
    ids, biases = tuple(params.logit_bias_token_ids), tuple(params.logit_biases)
    _require(len(ids) == len(biases), "logit_bias_token_ids and logit_biases differ in length")
    _require(len(ids) <= _MAX_LOGIT_BIASES, "logit_bias may name at most 1024 tokens")
    _require(len(set(ids)) == len(ids), "logit_bias names a token twice")
    _require(not ids or max(ids) <= MAX_TOKEN_ID, "logit_bias_token_ids must be below 2^31")
    good = all(-100.0 <= bias <= 100.0 for bias in biases)
    _require(good, "logit_biases must be from -100 to 100")
    return tuple(zip(ids, biases, strict=True))


def _rejection(request: queue_pb2.QueuedRequest, problem: str) -> Notice | None:
    if len(request.request_id) != 16 or not _good_name(request.gateway_id):
        return None
    return Notice(
        gateway_id=request.gateway_id,
        request_id=RequestId(request.request_id),
        attempt=request.attempt,
        reason=FinishReason.REJECTED,
        message=problem,
    )


def _good_name(name: str) -> bool:
    return 1 <= len(name.encode()) <= _MAX_NAME_BYTES


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise MalformedError(problem)


def encode_notice(notice: Notice) -> bytes:
    """The value of field `notice` in a gateway's notice stream."""
    return queue_pb2.Notice(
        request_id=notice.request_id,
        attempt=notice.attempt,
        finish_reason=common_pb2.FinishReason.ValueType(notice.reason.value),
        message=notice.message,
    ).SerializeToString()


def decode_worker_record(raw: bytes) -> WorkerRecord:
    """A worker's registry value. Raises MalformedError."""
    try:
        record = queue_pb2.WorkerRecord.FromString(raw)
    except DecodeError as error:
        raise MalformedError("not a WorkerRecord") from error
    _require(_good_name(record.worker_id), "worker_id must have 1 to 256 bytes")
    _require(_good_name(record.address), "address must have 1 to 256 bytes")
    _require(record.incarnation != 0, "incarnation must not be 0")
    return WorkerRecord(
        worker_id=WorkerId(record.worker_id),
        incarnation=record.incarnation,
        address=record.address,
        model_digest=record.model_digest,
    )


# Session, outgoing


def encode_open(*, epoch: int, last_result_step: int, incarnation: int) -> bytes:
    """First message of a session."""
    return worker_pb2.SessionRequest(
        open=worker_pb2.Open(
            epoch=epoch,
            min_schema_revision=SCHEMA_REVISION,
            max_schema_revision=SCHEMA_REVISION,
            last_result_step=last_result_step,
            incarnation=incarnation,
        )
    ).SerializeToString()


def encode_plan(plan: ready.StepPlan) -> bytes:
    """A step plan as a session message."""
    message = worker_pb2.SessionRequest()
    out = message.plan
    out.epoch = plan.epoch
    out.step = plan.step
    out.based_on_step = plan.based_on_step
    out.num_steps = plan.num_steps
    out.reset = plan.reset
    out.digest = plan.digest
    if plan.releases:
        out.release_slots.extend(plan.releases)
    for admit in plan.admits:
        _fill_admit(out.admits.add(), admit)
    if plan.changed:
        slots, numbers = zip(*plan.changed, strict=True)
        out.changed_slots.extend(slots)
        out.changed_num_tokens.extend(numbers)
    if plan.growth:
        slots, blocks = zip(*plan.growth, strict=True)
        out.grow_slots.extend(slots)
        out.grow_block_ids.extend(blocks)
    for operation in plan.operations:
        out.operations.add(
            op_id=operation.op_id,
            kind=operations_pb2.Operation.Kind.ValueType(operation.kind.value),
            source_blocks=operation.sources,
            target_blocks=operation.targets,
        )
    return message.SerializeToString()


def _fill_admit(out: worker_pb2.Admit, admit: ready.Admit) -> None:
    out.slot, out.generation = admit.slot, admit.generation
    out.request_id, out.attempt = admit.request_id, admit.attempt
    out.reply_to = admit.reply_to
    out.token_ids.extend(admit.token_ids)
    out.prompt_len = admit.prompt_len
    # To set a field costs three times what a look at it does.
    if admit.num_cached_tokens or admit.num_computed_tokens or admit.emit_from:
        out.emit_from = admit.emit_from
        out.num_computed_tokens = admit.num_computed_tokens
        out.num_cached_tokens = admit.num_cached_tokens
    out.block_ids.extend(admit.block_ids)
    out.kind = _GENERATE
    if admit.sample_index:
        out.sample_index = admit.sample_index
    out.traceparent = admit.traceparent
    _fill_sampling(out.sampling, admit.sampling)


def _fill_sampling(out: common_pb2.SamplingParams, spec: SamplingSpec) -> None:
    out.max_tokens = spec.max_tokens
    out.temperature, out.top_p, out.seed = spec.temperature, spec.top_p, spec.seed
    if spec.stop_token_ids:
        out.stop_token_ids.extend(spec.stop_token_ids)
    if spec.top_k or spec.min_tokens or spec.min_p:
        out.top_k, out.min_tokens, out.min_p = spec.top_k, spec.min_tokens, spec.min_p
    if spec.presence_penalty or spec.frequency_penalty:
        out.presence_penalty, out.frequency_penalty = spec.presence_penalty, spec.frequency_penalty
    if spec.repetition_penalty != 1.0:
        out.repetition_penalty = spec.repetition_penalty
    if spec.logit_bias:
        ids, biases = zip(*spec.logit_bias, strict=True)
        out.logit_bias_token_ids.extend(ids)
        out.logit_biases.extend(biases)
    if spec.num_logprobs is not None:
        out.num_logprobs = spec.num_logprobs
        out.prompt_logprobs = spec.prompt_logprobs


# Session, incoming


def decode_worker_message(raw: bytes) -> WorkerMessage | None:
    """A message of a worker; None for a kind of a later revision. Raises MalformedError."""
    try:
        message = worker_pb2.SessionResponse.FromString(raw)
    except DecodeError as error:
        raise MalformedError("not a SessionResponse") from error
    kind = message.WhichOneof("kind")
    match kind:
        case "result":
            return _step_report(message.result)
        case "heartbeat":
            return Heartbeat(last_step=message.heartbeat.last_step, busy=message.heartbeat.busy)
        case "cancels":
            return Cancels(request_ids=_request_ids(message.cancels.request_ids))
        case "subscriptions":
            return Subscriptions(gateway_ids=_gateway_ids(message.subscriptions.gateway_ids))
        case "hello":
            return _hello(message.hello)
        case "snapshot":
            return _snapshot(message.snapshot)
        case "draining":
            return Draining()
        case "refused":
            _require(message.refused.highest_epoch <= limits.MAX_EPOCH, "no epoch is so high")
            return Refused(highest_epoch=message.refused.highest_epoch)
        case None:
            return None
        case _:
            assert_never(kind)


def _step_report(result: worker_pb2.StepResult) -> StepReport:
    num_rows = max(len(result.slots), len(result.finish_reasons), len(result.faults))
    _require(num_rows <= limits.MAX_SLOTS, "more rows than any worker has")
    _require(len(result.operations_done) <= limits.MAX_OPERATIONS, "too many operations")
    # By slices: a copy in one go, where walking a column costs a call for each number.
    slots, token_ids = tuple(result.slots[:]), tuple(result.token_ids[:])
    times = result.times
    _require(len(slots) == len(token_ids), "columns slots and token_ids differ in length")
    _require(not token_ids or max(token_ids) <= MAX_TOKEN_ID, "token_ids must be below 2^31")
    finished: tuple[tuple[Slot, FinishReason], ...] = ()
    if result.finished_slots:
        reasons = [_FINISH.get(int(r)) for r in result.finish_reasons]
        _require(len(reasons) == len(result.finished_slots), "columns of ends differ in length")
        pairs = zip(result.finished_slots, reasons, strict=True)
        finished = tuple((Slot(s), r or FinishReason.ERROR) for s, r in pairs)
    faults = tuple(_fault(f) for f in result.faults) if result.faults else ()
    return StepReport(
        epoch=result.epoch,
        step=result.step,
        slots=slots,  # type: ignore[arg-type]  # a NewType; wrapping each would cost per token
        token_ids=token_ids,
        finished=finished,
        num_wasted_rows=result.num_wasted_rows,
        faults=faults,
        idle_us=times.idle_us,
        step_us=times.apply_us + times.forward_us + times.sample_us,
        total_us=times.total_us,
        operations_done=tuple(result.operations_done),
    )


def _fault(fault: worker_pb2.Fault) -> FaultReport:
    scopes = {scope.value: scope for scope in FaultScope}
    return FaultReport(
        scope=scopes.get(int(fault.scope), FaultScope.WORKER),
        code=_code_name(int(fault.code)),
        slot=fault.slot,
        message=fault.message[: limits.MAX_FAULT_CHARS],
        digest_mismatch=fault.code == worker_pb2.Fault.CODE_DIGEST_MISMATCH,
    )


def _code_name(code: int) -> str:
    known = worker_pb2.Fault.Code.DESCRIPTOR.values_by_number
    return known[code].name.removeprefix("CODE_") if code in known else str(code)


def _hello(hello: worker_pb2.Hello) -> Hello:
    _require(_good_name(hello.worker_id), "worker_id must have 1 to 256 bytes")
    _require(hello.incarnation != 0, "incarnation must not be 0")
    _require(len(hello.cache_groups) == 1, "exactly one cache group is supported")
    group = hello.cache_groups[0]
    _require(1 <= group.block_size <= limits.MAX_BLOCK_SIZE, "block_size must be from 1 to 65536")
    _require(group.num_device_blocks >= 1, "num_device_blocks must be at least 1")
    for name in ("num_slots", "max_num_batched_tokens", "max_model_len"):
        _require(getattr(hello, name) >= 1, f"{name} must be at least 1")
    return Hello(
        min_schema_revision=hello.min_schema_revision,
        max_schema_revision=hello.max_schema_revision,
        worker_id=WorkerId(hello.worker_id),
        incarnation=hello.incarnation,
        model_digest=hello.model_digest[:_MAX_NAME_BYTES],
        capacity=WorkerCapacity(
            num_slots=min(hello.num_slots, limits.MAX_SLOTS),
            num_blocks=min(group.num_device_blocks, limits.MAX_BLOCKS),
            block_size=group.block_size,
            max_num_batched_tokens=hello.max_num_batched_tokens,
            max_model_len=min(hello.max_model_len, limits.MAX_MODEL_LEN),
            num_host_blocks=min(group.num_host_blocks, limits.MAX_BLOCKS),
            block_bytes=group.block_bytes,
        ),
        cost=CostProfile(
            step_us=_cost(hello.cost.step_us),
            token_us=_cost(hello.cost.token_us),
            swap_out_gb_per_s=_cost(hello.cost.swap_out_gb_per_s),
            swap_in_gb_per_s=_cost(hello.cost.swap_in_gb_per_s),
        ),
        last_applied_step=hello.last_applied_step,
        first_result_step=hello.first_result_step,
    )


def _cost(value: float) -> float:
    return value if limits.LEAST_COST <= value <= limits.MOST_COST else 0.0


def _snapshot(snapshot: worker_pb2.Snapshot) -> SnapshotChunk:
    attempts: dict[RequestId, int] = {}
    for state in snapshot.slots:
        _raise_attempt(attempts, state.request_id, state.attempt)
    for ended in snapshot.recent_finishes:
        _raise_attempt(attempts, ended.request_id, ended.attempt)
    return SnapshotChunk(
        attempts=attempts,
        gateway_ids=_gateway_ids(snapshot.gateway_ids),
        last=snapshot.last,
    )


def _raise_attempt(attempts: dict[RequestId, int], request_id: bytes, attempt: int) -> None:
    _require(len(request_id) == 16 and attempt <= MAX_TOKEN_ID, "no such request can be held")
    key = RequestId(request_id)
    attempts[key] = max(attempt, attempts.get(key, 0))


def _gateway_ids(ids: Collection[str]) -> frozenset[str]:
    _require(len(ids) <= limits.MAX_GATEWAYS, "too many gateway ids")
    # Strangers may subscribe under any name: one that no gateway has costs the worker nothing.
    return frozenset(filter(_good_name, ids))


def _request_ids(ids: Collection[bytes]) -> tuple[RequestId, ...]:
    _require(len(ids) <= limits.MAX_CANCELS, "too many cancels in one message")
    return tuple(RequestId(i) for i in ids if len(i) == 16)
