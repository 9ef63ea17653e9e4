"""What the scheduler's codec lets in and how it writes plans."""

import contextlib
import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import common_pb2, operations_pb2, queue_pb2, worker_pb2

from scheduler_svc import codec
from scheduler_svc.core import ready
from scheduler_svc.core.events import RequestArrived
from scheduler_svc.core.types import (
    BlockId,
    FaultScope,
    FinishReason,
    OperationKind,
    RequestId,
    SamplingSpec,
    Slot,
    WorkerId,
)
from scheduler_svc.ports import (
    Cancels,
    Draining,
    Heartbeat,
    Hello,
    Notice,
    Refused,
    SnapshotChunk,
    StepReport,
    Subscriptions,
)

ID = b"0123456789abcdef"


def sampling(**fields: Any) -> common_pb2.SamplingParams:
    """Valid parameters but for `fields`."""
    return common_pb2.SamplingParams(**({"max_tokens": 8, "top_p": 1.0} | fields))


def biased(token_ids: Iterable[int], biases: list[float]) -> common_pb2.SamplingParams:
    """With these columns."""
    return sampling(logit_bias_token_ids=token_ids, logit_biases=biases)


def request(**fields: Any) -> queue_pb2.QueuedRequest:
    """A valid request but for `fields`."""
    values: dict[str, Any] = {
        "request_id": ID,
        "attempt": 2,
        "gateway_id": "g1",
        "reply_to": b"r" * 16,
        "prompt_token_ids": [5, 6, 7],
        "output_token_ids": [8],
        "sampling": sampling(),
        "priority": -4,
        "cache_salt": b"salt",
        "traceparent": "00-aa",
        "tenant": "acme",
        "tenant_weight": 2.5,
        "sample_index": 3,
        "sample_group": b"g" * 16,
    }
    return queue_pb2.QueuedRequest(**(values | fields))


def decode(
    raw: bytes | None, deadline: bytes = b"1700000000000"
) -> RequestArrived | codec.CancelEntry | codec.BadEntry:
    """One entry, with a clock that is Redis time in ns."""
    fields = {} if raw is None else {b"entry": raw}
    return codec.decode_entry(
        fields | {b"deadline_ms": deadline},
        entry_id="1-0",
        now_ns=3,
        to_deadline_ns=lambda ms: ms * 1_000_000,
    )


def decode_request(**fields: Any) -> RequestArrived | codec.CancelEntry | codec.BadEntry:
    """An entry with this request."""
    return decode(queue_pb2.QueueEntry(request=request(**fields)).SerializeToString())


EVERY_FIELD: dict[str, Any] = {
    "max_tokens": 9,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "seed": 2**64 - 1,
    "stop_token_ids": [3, 4],
    "min_tokens": 2,
    "min_p": 0.125,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "repetition_penalty": 1.5,
    "logit_bias_token_ids": [2**31 - 1, 7],
    "logit_biases": [-100.0, 100.0],
    "num_logprobs": 20,
    "prompt_logprobs": True,
}
EVERY_FIELD_READ = SamplingSpec(
    max_tokens=9,
    temperature=0.5,
    top_p=0.25,
    top_k=7,
    seed=2**64 - 1,
    stop_token_ids=(3, 4),
    min_tokens=2,
    min_p=0.125,
    presence_penalty=-2.0,
    frequency_penalty=2.0,
    repetition_penalty=1.5,
    logit_bias=((2**31 - 1, -100.0), (7, 100.0)),
    num_logprobs=20,
    prompt_logprobs=True,
)


def test_every_field_of_a_request_arrives() -> None:
    params = sampling(**EVERY_FIELD)
    assert decode_request(sampling=params) == RequestArrived(
        now_ns=3,
        request_id=RequestId(ID),
        entry_id="1-0",
        attempt=2,
        gateway_id="g1",
        reply_to=b"r" * 16,
        prompt_token_ids=(5, 6, 7),
        output_token_ids=(8,),
        sampling=EVERY_FIELD_READ,
        priority=-4,
        deadline_ns=1_700_000_000_000_000_000,
        cache_salt=b"salt",
        traceparent="00-aa",
        tenant="acme",
        tenant_weight=2.5,
        sample_index=3,
        sample_group=b"g" * 16,
    )


def test_without_a_tenant_all_are_one_of_weight_one() -> None:
    arrived = decode_request(tenant="", tenant_weight=0.0)
    assert isinstance(arrived, RequestArrived)
    assert (arrived.tenant, arrived.tenant_weight) == ("", 1.0)


def test_what_sampling_leaves_out_has_the_defaults() -> None:
    arrived = decode_request(sampling=sampling(top_p=1.0))
    assert isinstance(arrived, RequestArrived)
    assert arrived.sampling == SamplingSpec(max_tokens=8)
    none_beside = decode_request(sampling=sampling(num_logprobs=0))
    assert isinstance(none_beside, RequestArrived)
    assert none_beside.sampling.num_logprobs == 0
    longest = decode_request(
        sampling=sampling(prompt_logprobs=True, num_logprobs=20), prompt_token_ids=[1] * 49_932
    )
    assert isinstance(longest, RequestArrived)


def test_a_cancel_arrives() -> None:
    entry = queue_pb2.QueueEntry(cancel=queue_pb2.QueuedCancel(request_id=ID))
    assert decode(entry.SerializeToString()) == codec.CancelEntry(request_id=RequestId(ID))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"attempt": 0}, "attempt"),
        ({"attempt": 2**31}, "attempt"),
        ({"reply_to": b"short"}, "reply_to"),
        ({"sample_group": b"short"}, "sample_group"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [2**31]}, "prompt_token_ids"),
        ({"output_token_ids": [2**31]}, "output_token_ids"),
        ({"output_token_ids": [1] * 8}, "max_tokens"),
        ({"sampling": None}, "sampling"),
        ({"sampling": sampling(max_tokens=0)}, "max_tokens"),
        ({"sampling": sampling(max_tokens=2**31)}, "max_tokens"),
        ({"sampling": sampling(temperature=-0.1)}, "temperature"),
        ({"sampling": sampling(temperature=math.nan)}, "temperature"),
        ({"sampling": sampling(temperature=math.inf)}, "temperature"),
        ({"sampling": sampling(top_p=0.0)}, "top_p"),
        ({"sampling": sampling(top_p=1.5)}, "top_p"),
        ({"sampling": sampling(top_p=math.nan)}, "top_p"),
        ({"sampling": sampling(top_k=2**31)}, "top_k"),
        ({"sampling": sampling(min_tokens=9)}, "min_tokens"),
        ({"sampling": sampling(stop_token_ids=[2**31])}, "stop_token_ids"),
        ({"sampling": sampling(stop_token_ids=[1] * 5000)}, "stop_token_ids"),
        ({"sampling": sampling(min_p=-0.1)}, "min_p"),
        ({"sampling": sampling(min_p=1.5)}, "min_p"),
        ({"sampling": sampling(min_p=math.nan)}, "min_p"),
        ({"sampling": sampling(presence_penalty=2.5)}, "presence_penalty"),
        ({"sampling": sampling(presence_penalty=math.nan)}, "presence_penalty"),
        ({"sampling": sampling(frequency_penalty=-2.5)}, "frequency_penalty"),
        ({"sampling": sampling(frequency_penalty=-math.inf)}, "frequency_penalty"),
        ({"sampling": sampling(repetition_penalty=-1.0)}, "repetition_penalty"),
        ({"sampling": sampling(repetition_penalty=math.inf)}, "repetition_penalty"),
        ({"sampling": sampling(repetition_penalty=math.nan)}, "repetition_penalty"),
        ({"sampling": biased([1, 2], [1.0])}, "differ in length"),
        ({"sampling": biased([1], [1.0, 2.0])}, "differ in length"),
        ({"sampling": biased([1, 1], [1.0, 2.0])}, "twice"),
        ({"sampling": biased([2**31], [1.0])}, "logit_bias_token_ids"),
        ({"sampling": biased([1], [100.5])}, "logit_biases"),
        ({"sampling": biased([1], [math.nan])}, "logit_biases"),
        ({"sampling": biased(range(1025), [0.5] * 1025)}, "1024"),
        ({"sampling": sampling(num_logprobs=21)}, "num_logprobs"),
        ({"sampling": sampling(prompt_logprobs=True)}, "prompt_logprobs needs num_logprobs"),
        (
            {
                "sampling": sampling(prompt_logprobs=True, num_logprobs=20),
                "prompt_token_ids": [1] * 49_933,
            },
            "1048593 values; 1048576 are allowed",
        ),
        ({"cache_salt": b"s" * 257}, "cache_salt"),
        ({"traceparent": "t" * 257}, "traceparent"),
        ({"tenant": "t" * 257}, "tenant"),
        ({"tenant_weight": -1.0}, "tenant_weight"),
        ({"tenant_weight": float("nan")}, "tenant_weight"),
        ({"tenant_weight": 1e7}, "tenant_weight"),
        ({"required_features": ["grammar", "vision"]}, "grammar, vision"),
    ],
)
def test_a_bad_request_is_answered_with_what_is_wrong(fields: dict[str, Any], word: str) -> None:
    bad = decode_request(**fields)
    assert isinstance(bad, codec.BadEntry)
    assert bad.notice is not None
    assert bad.notice.reason is FinishReason.REJECTED
    assert (bad.notice.gateway_id, bad.notice.request_id) == ("g1", ID)
    assert word in bad.notice.message


@pytest.mark.parametrize("deadline", [b"", b"-5", b"soon", b"1.5", b"9" * 16])
def test_a_bad_deadline_is_answered(deadline: bytes) -> None:
    bad = decode(queue_pb2.QueueEntry(request=request()).SerializeToString(), deadline)
    assert isinstance(bad, codec.BadEntry)
    assert bad.notice is not None
    assert "deadline_ms" in bad.problem


@pytest.mark.parametrize(
    "raw",
    [
        None,
        b"\xff",
        b"",
        queue_pb2.QueueEntry(request=request(request_id=b"short")).SerializeToString(),
        queue_pb2.QueueEntry(request=request(gateway_id="")).SerializeToString(),
        queue_pb2.QueueEntry(request=request(gateway_id="g" * 257)).SerializeToString(),
        queue_pb2.QueueEntry(cancel=queue_pb2.QueuedCancel()).SerializeToString(),
    ],
)
def test_an_entry_that_names_nobody_is_dropped_without_a_notice(raw: bytes | None) -> None:
    bad = decode(raw)
    assert isinstance(bad, codec.BadEntry)
    assert bad.notice is None


@given(st.binary(max_size=200))
def test_no_bytes_make_the_decoders_raise_what_they_do_not_promise(raw: bytes) -> None:
    decode(raw)
    for decoder in (codec.decode_worker_message, codec.decode_worker_record):
        with contextlib.suppress(codec.MalformedError):
            decoder(raw)


def test_a_plan_keeps_every_column() -> None:
    admit = ready.Admit(
        slot=Slot(3),
        generation=4,
        request_id=RequestId(ID),
        attempt=5,
        reply_to=b"r" * 16,
        token_ids=(1, 2, 3),
        prompt_len=2,
        emit_from=1,
        num_computed_tokens=16,
        num_cached_tokens=15,
        block_ids=(BlockId(9), BlockId(8)),
        sampling=EVERY_FIELD_READ,
        traceparent="00-aa",
        sample_index=6,
    )
    plan = ready.StepPlan(
        worker_id=WorkerId("w"),
        epoch=2**40,
        step=11,
        based_on_step=9,
        reset=True,
        releases=(Slot(1), Slot(2)),
        admits=(admit,),
        changed=((Slot(3), 17), (Slot(4), 0)),
        growth=((Slot(3), BlockId(7)),),
        digest=2**64 - 1,
        num_scheduled_tokens=17,
        num_rows=1,
        num_chunks=0,
        operations=(
            ready.Operation(op_id=5, kind=OperationKind.SWAP_IN, sources=(1, 0), targets=(7, 8)),
        ),
    )
    sent = worker_pb2.SessionRequest.FromString(codec.encode_plan(plan)).plan
    assert (sent.epoch, sent.step, sent.based_on_step) == (2**40, 11, 9)
    assert (sent.reset, sent.digest, sent.num_steps) == (True, 2**64 - 1, 1)
    assert list(sent.release_slots) == [1, 2]
    assert (list(sent.changed_slots), list(sent.changed_num_tokens)) == ([3, 4], [17, 0])
    assert (list(sent.grow_slots), list(sent.grow_block_ids)) == ([3], [7])
    (copied,) = sent.operations
    assert (copied.op_id, copied.kind, copied.group) == (
        5,
        operations_pb2.Operation.KIND_SWAP_IN,
        0,
    )
    assert (list(copied.source_blocks), list(copied.target_blocks)) == ([1, 0], [7, 8])
    (got,) = sent.admits
    assert (got.slot, got.generation, got.request_id, got.attempt) == (3, 4, ID, 5)
    assert (got.reply_to, list(got.token_ids), got.prompt_len) == (b"r" * 16, [1, 2, 3], 2)
    assert (got.emit_from, got.num_computed_tokens, got.num_cached_tokens) == (1, 16, 15)
    assert (list(got.block_ids), got.traceparent) == ([9, 8], "00-aa")
    assert got.sample_index == 6
    assert got.sampling == sampling(**EVERY_FIELD)


def test_a_steady_step_of_256_requests_is_at_most_128_bytes() -> None:
    def plan(growth: tuple[tuple[Slot, BlockId], ...]) -> ready.StepPlan:
        return ready.StepPlan(
            worker_id=WorkerId("w"),
            epoch=1_800_000_000_000,
            step=1_000_000,
            based_on_step=999_998,
            reset=False,
            releases=(),
            admits=(),
            changed=(),
            growth=growth,
            digest=2**64 - 1,
            num_scheduled_tokens=256,
            num_rows=256,
            num_chunks=0,
        )

    assert len(codec.encode_plan(plan(()))) <= 128
    growth = tuple((Slot(16 * i), BlockId(60_000 + i)) for i in range(16))
    assert len(codec.encode_plan(plan(growth))) < 1024


def test_a_notice_keeps_every_field() -> None:
    notice = Notice(
        gateway_id="g1",
        request_id=RequestId(ID),
        attempt=3,
        reason=FinishReason.DEADLINE,
        message="late",
    )
    sent = queue_pb2.Notice.FromString(codec.encode_notice(notice))
    assert (sent.request_id, sent.attempt, sent.message) == (ID, 3, "late")
    assert sent.finish_reason == common_pb2.FINISH_REASON_DEADLINE


def message(**fields: Any) -> Any:
    """A worker's message, decoded."""
    return codec.decode_worker_message(worker_pb2.SessionResponse(**fields).SerializeToString())


def test_a_result_keeps_its_columns_and_faults() -> None:
    result = worker_pb2.StepResult(
        epoch=4,
        step=5,
        slots=[1, 3],
        token_ids=[70, 80],
        finished_slots=[3, 4],
        finish_reasons=[
            common_pb2.FINISH_REASON_STOP,
            common_pb2.FINISH_REASON_UNSPECIFIED,
        ],
        num_wasted_rows=2,
        times=worker_pb2.StepTimes(
            idle_us=9, apply_us=1, forward_us=20, sample_us=300, total_us=9000
        ),
        faults=[
            worker_pb2.Fault(
                scope=worker_pb2.Fault.SCOPE_STEP,
                code=worker_pb2.Fault.CODE_DIGEST_MISMATCH,
                message="m",
            ),
            worker_pb2.Fault(slot=3),
        ],
    )
    report = message(result=result)
    assert isinstance(report, StepReport)
    assert (report.epoch, report.step, report.num_wasted_rows, report.idle_us) == (4, 5, 2, 9)
    assert report.step_us == 321
    assert (report.slots, report.token_ids) == ((1, 3), (70, 80))
    assert report.finished == ((3, FinishReason.STOP), (4, FinishReason.ERROR))
    assert report.faults[0].scope is FaultScope.STEP
    assert report.faults[0].digest_mismatch
    assert report.faults[1].scope is FaultScope.WORKER, "not said counts as the worker's"


@pytest.mark.parametrize(
    "result",
    [
        worker_pb2.StepResult(slots=[1]),
        worker_pb2.StepResult(finished_slots=[1]),
        worker_pb2.StepResult(slots=[1], token_ids=[1, 2]),
    ],
)
def test_uneven_columns_are_refused(result: worker_pb2.StepResult) -> None:
    with pytest.raises(codec.MalformedError):
        message(result=result)


def hello(**fields: Any) -> worker_pb2.Hello:
    """A valid Hello but for `fields`."""
    group = worker_pb2.CacheGroup(
        block_size=16, num_device_blocks=64, num_host_blocks=9, block_bytes=4096
    )
    values: dict[str, Any] = {
        "min_schema_revision": 1,
        "max_schema_revision": 1,
        "worker_id": "w",
        "incarnation": 7,
        "cache_groups": [group],
        "num_slots": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 2048,
        "cost": worker_pb2.CostProfile(
            step_us=100.0, token_us=math.nan, swap_out_gb_per_s=12.5, swap_in_gb_per_s=-1.0
        ),
    }
    return worker_pb2.Hello(**(values | fields))


def test_a_hello_becomes_a_capacity() -> None:
    got = message(hello=hello())
    assert isinstance(got, Hello)
    assert (got.capacity.num_blocks, got.capacity.block_size) == (64, 16)
    assert (got.capacity.num_slots, got.capacity.max_num_batched_tokens) == (8, 256)
    assert (got.cost.step_us, got.cost.token_us) == (100.0, 0.0)
    assert (got.cost.swap_out_gb_per_s, got.cost.swap_in_gb_per_s) == (12.5, 0.0)
    assert (got.capacity.num_host_blocks, got.capacity.block_bytes) == (9, 4096)


@pytest.mark.parametrize(
    "fields",
    [
        {"worker_id": ""},
        {"incarnation": 0},
        {"cache_groups": []},
        {"cache_groups": [worker_pb2.CacheGroup(block_size=16)]},
        {"cache_groups": [worker_pb2.CacheGroup(num_device_blocks=4)]},
        {"num_slots": 0},
        {"max_num_batched_tokens": 0},
        {"max_model_len": 0},
    ],
)
def test_a_hello_that_offers_nothing_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(codec.MalformedError):
        message(hello=hello(**fields))


def test_the_small_messages() -> None:
    heartbeat = worker_pb2.Heartbeat(last_step=4, busy=True)
    assert message(heartbeat=heartbeat) == Heartbeat(last_step=4, busy=True)
    subscriptions = worker_pb2.Subscriptions(gateway_ids=["a", "b"])
    assert message(subscriptions=subscriptions) == Subscriptions(gateway_ids=frozenset("ab"))
    cancels = worker_pb2.Cancels(request_ids=[ID, b"short"])
    assert message(cancels=cancels) == Cancels(request_ids=(RequestId(ID),))
    assert message(draining=worker_pb2.Draining()) == Draining()
    assert message(refused=worker_pb2.Refused(highest_epoch=9)) == Refused(highest_epoch=9)
    assert message() is None, "a kind that a later revision adds"


def test_a_snapshot_names_the_highest_attempt_of_each_request() -> None:
    snapshot = worker_pb2.Snapshot(
        slots=[worker_pb2.SlotState(request_id=ID, attempt=2)],
        recent_finishes=[worker_pb2.FinishedRequest(request_id=ID, attempt=1)],
        gateway_ids=["g"],
        last=True,
    )
    assert message(snapshot=snapshot) == SnapshotChunk(
        attempts={RequestId(ID): 2}, gateway_ids=frozenset("g"), last=True
    )


def test_a_worker_record_needs_name_address_and_incarnation() -> None:
    record = queue_pb2.WorkerRecord(worker_id="w", incarnation=3, address="h:1", model_digest="d")
    assert codec.decode_worker_record(record.SerializeToString()).address == "h:1"
    for name in ("worker_id", "incarnation", "address"):
        bad = queue_pb2.WorkerRecord.FromString(record.SerializeToString())
        bad.ClearField(name)  # type: ignore[arg-type]
        with pytest.raises(codec.MalformedError):
            codec.decode_worker_record(bad.SerializeToString())
