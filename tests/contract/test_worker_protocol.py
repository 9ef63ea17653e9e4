"""worker.proto as the worker speaks it: digest values, bytes of messages, codec round trips."""

import dataclasses
import enum
from array import array

import hypothesis.strategies as st
import pytest
from google.protobuf.message import DecodeError
from hypothesis import Phase, given, settings
from quire.v1 import common_pb2, operations_pb2, queue_pb2, worker_pb2

from gpu_worker import codec, digest
from gpu_worker.messages import (
    MAX_BATCH_LOGPROBS,
    Acknowledge,
    Admit,
    CancelRow,
    Cancels,
    Draining,
    Fault,
    FaultCode,
    FaultScope,
    FinishedRequest,
    FinishReason,
    Heartbeat,
    Open,
    SlotState,
    Snapshot,
    StepPlan,
    StepResult,
    StepTimes,
    Subscribe,
    Subscriptions,
    TokenBatch,
    TokenLogprobs,
)
from gpu_worker.ports import CacheGroupSpec, Operation, OperationKind, RunnerInfo, SamplingSpec
from gpu_worker.replica import Refusal, Replica
from gpu_worker.session import SCHEMA_REVISION
from scheduler_svc.core import digest as scheduler_digest
from servicekit import grpc_server
from tests.worker_builders import (
    LIMITS,
    PlanScript,
    make_admit,
    make_operation,
    plan_message,
    request_id,
)

INFO = RunnerInfo(
    model_digest="d" * 64,
    vocab_size=100,
    max_model_len=4096,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    cache_group=CacheGroupSpec(
        window=0, block_size=16, block_bytes=4096, num_blocks=512, num_host_blocks=128
    ),
    step_us=1500.0,
    token_us=2.5,
    swap_out_gb_per_s=20.5,
    swap_in_gb_per_s=24.0,
)

MIX = {
    (0, 0, 0, 0, 0): 0x0,
    (1, 0, 0, 0, 0): 0x17FB89EE9DCAB42A,
    (0, 1, 0, 0, 0): 0x3571BF6A698C351C,
    (0, 0, 1, 0, 0): 0x04404E4D85F9C515,
    (0, 0, 0, 1, 0): 0x4179B061E0C0E0D0,
    (0, 0, 0, 0, 1): 0x97DF942237175133,
    (3, 7, 0, 12, 4095): 0x00F51E044A743A64,
    (2**32 - 1, 2**32 - 1, 1, 2**20, 2**32 - 1): 0x8B4EFA61E7B40E35,
}


@pytest.mark.parametrize("entry", MIX)
def test_mix_has_the_agreed_values(entry: tuple[int, int, int, int, int]) -> None:
    assert digest.mix(*entry) == MIX[entry]
    assert scheduler_digest.mix(*entry) == MIX[entry]


def test_a_digest_is_the_sum_of_its_tables() -> None:
    whole = digest.table_sum(3, 2, 0, [9, 8, 7])
    assert whole == sum(digest.mix(3, 2, 0, i, b) for i, b in enumerate([9, 8, 7])) % 2**64
    assert digest.add(digest.table_sum(3, 2, 0, [9]), digest.table_sum(3, 2, 1, [8, 7])) == whole
    assert digest.add(5, -6) == 2**64 - 1


def test_enums_equal_those_of_the_contract() -> None:
    pairs: list[tuple[type[enum.IntEnum], dict[str, int], str]] = [
        (FinishReason, dict(common_pb2.FinishReason.items()), "FINISH_REASON_"),
        (FaultScope, dict(worker_pb2.Fault.Scope.items()), "SCOPE_"),
        (FaultCode, dict(worker_pb2.Fault.Code.items()), "CODE_"),
        (OperationKind, dict(operations_pb2.Operation.Kind.items()), "KIND_"),
    ]
    for ours, theirs, prefix in pairs:
        assert {prefix + member.name: member.value for member in ours}.items() <= theirs.items()


def steady_plan() -> StepPlan:
    """A decode step of 256 requests, none of which changes; numbers as after days of running."""
    return StepPlan(epoch=1_800_000_000_000, step=50_000_000, digest=2**64 - 1)


def test_a_steady_decode_step_of_256_rows_is_at_most_128_bytes() -> None:
    message = plan_message(steady_plan())
    message.based_on_step = 49_999_998
    wire = worker_pb2.SessionRequest(plan=message).SerializeToString()
    assert len(wire) <= 128
    assert wire.hex() == STEADY_HEX


STEADY_HEX = "121c0880a0f1c2b1341080e1eb1718fee0eb17200161ffffffffffffffff"


def test_a_sixteenth_of_256_rows_grows_in_less_than_a_kibibyte() -> None:
    plan = StepPlan(
        epoch=1_800_000_000_000,
        step=50_000_000,
        grow_slots=tuple(range(0, 256, 16)),
        grow_block_ids=tuple(range(1_000_000, 1_000_016)),
        digest=2**64 - 1,
    )
    assert plan_message(plan).ByteSize() < 1024


tokens = st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
ids = st.binary(min_size=16, max_size=16)
floats = st.floats(0, 2, width=32)
sampling_specs = st.builds(
    SamplingSpec,
    max_tokens=u32,
    temperature=floats,
    top_p=floats,
    top_k=u32,
    seed=u64,
    stop_token_ids=tokens,
    min_tokens=u32,
    sample_index=u32,
    min_p=floats,
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats.filter(bool),
    logit_bias=st.lists(st.tuples(u32, floats), max_size=3).map(tuple),
    num_logprobs=st.none() | u32,
    prompt_logprobs=st.booleans(),
)
admits = st.builds(
    Admit,
    slot=u32,
    generation=u32,
    request_id=ids,
    attempt=u32,
    reply_to=ids,
    token_ids=tokens,
    prompt_len=u32,
    emit_from=u32,
    num_computed_tokens=u32,
    num_cached_tokens=u32,
    block_ids=tokens,
    sampling=sampling_specs,
)
operations = st.builds(
    Operation,
    op_id=u64,
    kind=st.integers(0, 2**31 - 1),
    group=u32,
    source_blocks=tokens,
    target_blocks=tokens,
)
plans = st.builds(
    StepPlan,
    epoch=u64,
    step=u64,
    num_steps=u32,
    reset=st.booleans(),
    release_slots=tokens,
    admits=st.lists(admits, max_size=2).map(tuple),
    changed_slots=tokens,
    changed_num_tokens=tokens,
    grow_slots=tokens,
    grow_block_ids=tokens,
    digest=u64,
    operations=st.lists(operations, max_size=2).map(tuple),
)


@settings(max_examples=50, phases=(Phase.explicit, Phase.generate), deadline=None)
@given(plan=plans)
def test_any_plan_comes_through_as_it_was_sent(plan: StepPlan) -> None:
    wire = worker_pb2.SessionRequest(plan=plan_message(plan)).SerializeToString()
    assert codec.session_request(worker_pb2.SessionRequest.FromString(wire)) == plan


@given(data=st.binary(max_size=200))
def test_any_plan_bytes_become_a_plan(data: bytes) -> None:
    message = worker_pb2.StepPlan()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return
    codec.step_plan(message)


def test_an_admission_of_an_unknown_kind_is_marked() -> None:
    message = plan_message(PlanScript().plan(admits=[make_admit()]))
    assert codec.step_plan(message).admits[0].generates
    message.admits[0].kind = worker_pb2.Admit.KIND_UNSPECIFIED
    assert codec.step_plan(message).admits[0].generates
    message.admits[0].kind = 2  # type: ignore[assignment]
    assert not codec.step_plan(message).admits[0].generates


def test_what_an_admission_leaves_out_has_the_defaults() -> None:
    message = plan_message(PlanScript().plan(admits=[make_admit()]))
    params = common_pb2.SamplingParams(max_tokens=4, top_p=1.0)
    message.admits[0].sampling.CopyFrom(params)
    assert codec.step_plan(message).admits[0].sampling == SamplingSpec(max_tokens=4)


@pytest.mark.parametrize(("ids", "biases"), [([1, 2], [1.0]), ([1], [1.0, 2.0])])
def test_a_bias_without_its_half_is_left_for_the_replica_to_refuse(
    ids: list[int], biases: list[float]
) -> None:
    message = plan_message(PlanScript().plan(admits=[make_admit()]))
    message.admits[0].sampling.logit_bias_token_ids.extend(ids)
    message.admits[0].sampling.logit_biases.extend(biases)
    plan = codec.step_plan(message)
    assert plan.admits[0].sampling.logit_bias[0] == (1, 1.0)
    assert isinstance(Replica(LIMITS).apply(plan), Refusal)


def test_open_and_what_is_unknown() -> None:
    opening = worker_pb2.Open(
        epoch=3, min_schema_revision=1, max_schema_revision=2, last_result_step=9, incarnation=4
    )
    assert codec.session_request(worker_pb2.SessionRequest(open=opening)) == Open(
        epoch=3, min_schema_revision=1, max_schema_revision=2, last_result_step=9, incarnation=4
    )
    with pytest.raises(codec.UnknownMessageError):
        codec.session_request(worker_pb2.SessionRequest())
    with pytest.raises(codec.UnknownMessageError):
        codec.tokens_request(worker_pb2.TokensRequest())


def test_hello_says_what_the_worker_holds() -> None:
    hello = codec.hello(
        worker_id="w",
        incarnation=2**64 - 1,
        schema_revision=SCHEMA_REVISION,
        info=INFO,
        last_applied_step=8,
        first_result_step=3,
    ).hello
    assert (hello.min_schema_revision, hello.max_schema_revision) == (1, 1)
    assert (hello.worker_id, hello.incarnation) == ("w", 2**64 - 1)
    (group,) = hello.cache_groups
    assert (group.kind, group.num_device_blocks) == (worker_pb2.CacheGroup.KIND_FULL, 512)
    assert (group.block_bytes, group.num_host_blocks) == (4096, 128)
    assert (hello.cost.swap_out_gb_per_s, hello.cost.swap_in_gb_per_s) == (20.5, 24.0)
    assert (hello.num_slots, hello.max_num_batched_tokens, hello.max_model_len) == (256, 2048, 4096)
    assert (hello.cost.step_us, hello.cost.token_us) == (1500.0, 2.5)
    assert (hello.last_applied_step, hello.first_result_step) == (8, 3)


RESULT = StepResult(
    epoch=3,
    step=9,
    digest=2**63,
    slots=[0, 4],
    token_ids=[17, 50_000],
    finished_slots=[4],
    finish_reasons=[FinishReason.STOP],
    num_wasted_rows=1,
    faults=[
        Fault(scope=FaultScope.REQUEST, code=FaultCode.COMPUTE, slot=4, message="m", retryable=True)
    ],
    times=StepTimes(idle_us=1, apply_us=2, forward_us=3, sample_us=4, total_us=2**40),
)
OPERATED = dataclasses.replace(RESULT, operations_done=[2**64 - 1, 7])
OPERATIONS = StepPlan(
    epoch=3,
    step=9,
    operations=(
        make_operation(7, OperationKind.SWAP_OUT, [(300, 0), (2, 1)]),
        make_operation(2**64 - 1, OperationKind.COPY, [(0, 5)], group=1),
    ),
)


def test_a_result_keeps_its_columns() -> None:
    message = codec.session_response(RESULT).result
    assert (message.epoch, message.step, message.digest) == (3, 9, 2**63)
    assert (list(message.slots), list(message.token_ids)) == ([0, 4], [17, 50_000])
    assert list(message.finished_slots) == [4]
    assert list(message.finish_reasons) == [common_pb2.FINISH_REASON_STOP]
    (fault,) = message.faults
    assert (fault.scope, fault.code) == (
        worker_pb2.Fault.SCOPE_REQUEST,
        worker_pb2.Fault.CODE_COMPUTE,
    )
    assert (fault.slot, fault.message, fault.retryable) == (4, "m", True)
    assert message.times.total_us == 2**32 - 1
    assert list(message.operations_done) == []
    assert list(codec.session_response(OPERATED).result.operations_done) == [2**64 - 1, 7]


def test_a_steady_result_of_256_rows_is_less_than_two_kibibytes() -> None:
    result = StepResult(
        epoch=1_800_000_000_000,
        step=50_000_000,
        digest=2**64 - 1,
        slots=list(range(256)),
        token_ids=[100_000] * 256,
        times=StepTimes(idle_us=10, apply_us=500, forward_us=9000, sample_us=700, total_us=20_000),
    )
    assert codec.session_response(result).ByteSize() < 2048


BATCH = TokenBatch(
    step=9,
    request_ids=[request_id(1), request_id(2)],
    attempts=[1, 3],
    first_positions=[0, 7],
    num_tokens=[2, 0],
    token_ids=[5, 6],
    finish_reasons=[0, FinishReason.ERROR],
    num_cached_tokens=[16, 0],
)


def test_a_token_batch_keeps_its_columns() -> None:
    message = codec.token_batch(12, BATCH).batch
    assert (message.sequence, message.step) == (12, 9)
    assert message.request_ids == request_id(1) + request_id(2)
    assert (list(message.attempts), list(message.first_positions)) == ([1, 3], [0, 7])
    assert (list(message.num_tokens), list(message.token_ids)) == ([2, 0], [5, 6])
    assert list(message.finish_reasons) == [0, common_pb2.FINISH_REASON_ERROR]
    assert list(message.num_cached_tokens) == [16, 0]


SCORED = dataclasses.replace(
    BATCH,
    logprobs=[
        TokenLogprobs(
            entry=0,
            num_prompt_rows=1,
            num_top=2,
            logprobs=array("f", [-1.0, -0.5, -2.0]),
            top_token_ids=array("i", [7, 8, 5, 300, 6, 70_000]),
            top_logprobs=array("f", [-0.25, -1.0, -0.5, -0.75, -2.0, -3.0]),
        )
    ],
)


def test_a_token_batch_keeps_its_logprobs() -> None:
    assert codec.token_batch(12, BATCH).batch.logprobs == []
    (entry,) = codec.token_batch(12, SCORED).batch.logprobs
    assert (entry.entry, entry.num_prompt_rows, entry.num_top) == (0, 1, 2)
    assert list(entry.logprobs) == [-1.0, -0.5, -2.0]
    assert list(entry.top_token_ids) == [7, 8, 5, 300, 6, 70_000]
    assert list(entry.top_logprobs) == [-0.25, -1.0, -0.5, -0.75, -2.0, -3.0]


def test_the_fullest_batch_is_under_the_bound_of_a_message() -> None:
    """With the largest token ids, whose varints are the longest."""
    num_top = 20
    num_rows = MAX_BATCH_LOGPROBS // (1 + num_top)
    entry = TokenLogprobs(
        entry=0,
        num_prompt_rows=num_rows - 1,
        num_top=num_top,
        logprobs=array("f", [-1.5]) * num_rows,
        top_token_ids=array("i", [2**31 - 1]) * (num_rows * num_top),
        top_logprobs=array("f", [-2.5]) * (num_rows * num_top),
    )
    assert entry.num_values <= MAX_BATCH_LOGPROBS
    message = codec.token_batch(1, dataclasses.replace(BATCH, logprobs=[entry]))
    assert message.ByteSize() < 0.6 * grpc_server.MAX_MESSAGE_BYTES


def test_the_other_messages_say_what_they_are_given() -> None:
    snapshot = Snapshot(
        slots=[
            SlotState(
                slot=1, generation=2, request_id=request_id(1), attempt=3,
                num_computed_tokens=4, num_output_tokens=5,
            )
        ],
        recent_finishes=[
            FinishedRequest(
                request_id=request_id(2), attempt=1, finish_reason=FinishReason.LENGTH
            )
        ],
        gateway_ids=["g"],
        last=True,
    )  # fmt: skip
    message = codec.session_response(snapshot).snapshot
    assert (message.slots[0].generation, message.slots[0].num_output_tokens) == (2, 5)
    assert message.recent_finishes[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert (list(message.gateway_ids), message.last) == (["g"], True)
    beat = codec.session_response(Heartbeat(last_step=4, busy=True)).heartbeat
    assert (beat.last_step, beat.busy) == (4, True)
    told = codec.session_response(Subscriptions(gateway_ids=["a", "b"])).subscriptions
    assert list(told.gateway_ids) == ["a", "b"]
    cancels = codec.session_response(Cancels(request_ids=[request_id(1)])).cancels
    assert list(cancels.request_ids) == [request_id(1)]
    assert codec.session_response(Draining()).WhichOneof("kind") == "draining"
    assert codec.refused(7).refused.highest_epoch == 7
    first = codec.subscribed(incarnation=5, gap=True).subscribed
    assert (first.incarnation, first.gap) == (5, True)


def test_what_gateways_say_comes_through() -> None:
    subscribe = worker_pb2.Subscribe(
        gateway_id="g", reply_to=b"r" * 16, incarnation=6, last_sequence=4
    )
    assert codec.tokens_request(worker_pb2.TokensRequest(subscribe=subscribe)) == Subscribe(
        gateway_id="g", reply_to=b"r" * 16, incarnation=6, last_sequence=4
    )
    acknowledge = worker_pb2.Acknowledge(sequence=9)
    assert codec.tokens_request(worker_pb2.TokensRequest(acknowledge=acknowledge)) == Acknowledge(
        sequence=9
    )
    cancel = worker_pb2.CancelRow(request_id=b"q" * 16)
    assert codec.tokens_request(worker_pb2.TokensRequest(cancel=cancel)) == CancelRow(
        request_id=b"q" * 16
    )


def test_the_registry_record_says_where_the_worker_is() -> None:
    record = codec.worker_record(worker_id="w", incarnation=5, address="h:1", info=INFO)
    message = queue_pb2.WorkerRecord.FromString(record)
    assert (message.worker_id, message.incarnation, message.address) == ("w", 5, "h:1")
    assert (message.model_digest, message.max_model_len) == ("d" * 64, 4096)


GOLDEN = {
    "result": (
        codec.session_response(RESULT),
        "1a3c080310091a020004220411d086032a01043201013801420e080110021803200428ffffffff0f"
        "4a0b08011003180422016d2801510000000000000080",
    ),
    "result with operations": (
        codec.session_response(OPERATED),
        "1a49080310091a020004220411d086032a01043201013801420e080110021803200428ffffffff0f"
        "4a0b08011003180422016d2801510000000000000080"
        "5a0bffffffffffffffffff0107",
    ),
    "operations": (
        plan_message(OPERATIONS),
        "080310092001720d080710022203ac02022a020001721508ffffffffffffffffff01100118012201002a0105",
    ),
    "batch": (
        codec.token_batch(12, BATCH),
        "123e080c10091a20726571756573742d3030303030303031726571756573742d3030303030303032"
        "220201032a020007320202003a020506420200044a021000",
    ),
    "scored batch": (
        codec.token_batch(12, SCORED),
        "1277080c10091a20726571756573742d3030303030303031726571756573742d3030303030303032"
        "220201032a020007320202003a020506420200044a021000523710011a0c000080bf000000bf000000c0"
        "20022a09070805ac0206f0a2043218000080be000080bf000000bf000040bf000000c0000040c0",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_messages_have_the_bytes_of_this_revision(name: str) -> None:
    message, expected = GOLDEN[name]
    assert message.SerializeToString(deterministic=True).hex() == expected
