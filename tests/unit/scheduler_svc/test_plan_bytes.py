"""Bytes of the plans that a session carries: what does not change is not said."""

from dataclasses import replace

import pytest
from quire.v1 import worker_pb2

from scheduler_svc import codec, limits
from scheduler_svc.adapters.loss_rules import WorkerHealth
from scheduler_svc.adapters.worker_life import WorkerLife
from scheduler_svc.core import plan_size
from scheduler_svc.core.ready import Admit, Operation, Ready, StepPlan
from scheduler_svc.core.types import (
    BlockId,
    CostProfile,
    OperationKind,
    RequestId,
    SamplingSpec,
    Slot,
    WorkerId,
)
from servicekit import grpc_server
from tests.builders import make_core, make_request
from tests.cluster import Cluster

NUM_ROWS, BLOCK_SIZE = 256, 16


def sizes(*, spread: bool, num_steps: int) -> list[tuple[int, int]]:
    """Blocks taken and bytes sent in each of some decode steps of 256 requests.

    With `spread` a sixteenth of them takes a block in each step.
    """
    cluster = Cluster(make_core(max_inflight_steps=1))
    life = WorkerLife(
        worker_id=WorkerId("w"),
        epoch=1,
        incarnation=1,
        health=WorkerHealth(cost=CostProfile(), grace_ns=1, now_ns=0),
        gateway_ids=frozenset(),
    )
    sent: list[tuple[StepPlan, bytes]] = []

    def send(ready: Ready) -> None:
        for plan in ready.plans:
            raw = life.plan(plan, cluster.now_ns)
            assert raw is not None
            assert worker_pb2.SessionRequest.FromString(raw).ByteSize() == len(raw)
            sent.append((plan, raw))

    cluster.join(
        num_slots=NUM_ROWS,
        num_blocks=NUM_ROWS * 16,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=16384,
        max_model_len=4096,
    )
    send(cluster.last)
    send(cluster.step())
    lengths = [17 + (i % BLOCK_SIZE if spread else 0) for i in range(NUM_ROWS)]
    send(
        cluster.arrive_together(
            *(make_request(f"r{i}", prompt=n, max_tokens=200) for i, n in enumerate(lengths))
        )
    )
    for _ in range(num_steps + 1):
        send(cluster.step())
    decodes = [(plan, raw) for plan, raw in sent if plan.num_rows == NUM_ROWS and not plan.changed]
    assert len(decodes) == num_steps
    return [(len(plan.growth), len(raw)) for plan, raw in decodes]


@pytest.mark.parametrize(
    ("spread", "num_steps", "num_blocks", "limit"), [(False, 14, 0, 128), (True, 20, 16, 1023)]
)
def test_a_decode_step_of_256_is_small(
    spread: bool, num_steps: int, num_blocks: int, limit: int
) -> None:
    found = sizes(spread=spread, num_steps=num_steps)
    assert {blocks for blocks, _ in found} == {num_blocks}
    assert max(num_bytes for _, num_bytes in found) <= limit


def test_no_plan_is_larger_than_a_message_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are all in the cache cost a step a token each, and a plan all of their tokens.

    In small: 64 prompts of 400 tokens under a bound for about eight of them.
    """
    bound = 20_000
    monkeypatch.setattr(plan_size, "ADMIT_BYTES", bound)
    cluster = Cluster(make_core(max_inflight_steps=1))
    cluster.begin(num_slots=64, num_blocks=512, block_size=16, max_num_batched_tokens=512)
    cluster.arrive(make_request("first", prompt=400, max_tokens=40, family=1))
    cluster.steps(10)
    plans = list(
        cluster.arrive_together(
            *(make_request(f"r{i}", prompt=400, max_tokens=2, family=1) for i in range(63))
        ).plans
    )
    while any(stream.end is None for stream in cluster.gateway.streams.values()):
        plans += cluster.step().plans
    admits = [[plan_size.of_admit(admit) for admit in plan.admits] for plan in plans]
    assert max(map(len, admits)) > 4
    for plan, sizes_of in zip(plans, admits, strict=True):
        # Once the bound is reached, nothing more is admitted into the plan.
        assert sum(sizes_of[:-1]) < bound
        for admit, most in zip(plan.admits, sizes_of, strict=True):
            alone = replace(plan, admits=(admit,), growth=(), changed=(), releases=())
            assert len(codec.encode_plan(alone)) <= most
    # The rest has not waited longer than for the next plan.
    assert [bool(sizes_of) for sizes_of in admits[:9]] == [True] * 9


def test_the_largest_plan_fits_into_a_message() -> None:
    """One admission of the longest context on top of the bound, and all else at its limits."""
    most = 2**32 - 1
    spec = SamplingSpec(
        max_tokens=most,
        seed=2**64 - 1,
        stop_token_ids=(most,) * 4096,
        logit_bias=((most, 1.0),) * 1024,
    )
    longest = Admit(
        slot=Slot(limits.MAX_SLOTS),
        generation=most,
        request_id=RequestId(b"r" * 16),
        attempt=most,
        reply_to=b"s" * 16,
        token_ids=(2**31 - 1,) * limits.MAX_MODEL_LEN,
        prompt_len=most,
        emit_from=most,
        num_computed_tokens=most,
        num_cached_tokens=most,
        block_ids=(BlockId(limits.MAX_BLOCKS),) * limits.MAX_MODEL_LEN,
        sampling=spec,
        traceparent="x" * 256,
        sample_index=most,
    )
    slots = range(limits.MAX_SLOTS)
    moving = range(plan_size.MAX_BLOCKS_MOVING)
    copies = [(OperationKind.SWAP_OUT, (limits.MAX_BLOCKS,)) for _ in moving]
    copies += [(OperationKind.COPY, (limits.MAX_BLOCKS,)) for _ in slots]
    plan = StepPlan(
        worker_id=WorkerId("w"),
        epoch=2**52,
        step=2**40,
        based_on_step=2**40,
        num_steps=8,
        reset=False,
        releases=tuple(map(Slot, slots)),
        admits=(longest,),
        changed=tuple((Slot(slot), most) for slot in slots),
        growth=tuple((Slot(slot), BlockId(limits.MAX_BLOCKS)) for slot in slots) * 8,
        digest=2**64 - 1,
        num_scheduled_tokens=0,
        num_rows=0,
        num_chunks=0,
        operations=tuple(
            Operation(op_id=2**60, kind=kind, sources=blocks, targets=blocks)
            for kind, blocks in copies
        ),
    )
    admit_bytes = len(codec.encode_plan(replace(plan, growth=(), operations=(), changed=())))
    assert admit_bytes <= plan_size.of_admit(longest) + 2**16
    whole = len(codec.encode_plan(plan)) + plan_size.ADMIT_BYTES
    assert whole <= grpc_server.MAX_MESSAGE_BYTES
