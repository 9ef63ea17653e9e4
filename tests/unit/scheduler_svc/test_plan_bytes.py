"""Bytes of the plans that a session carries: what does not change is not said."""

import pytest
from quire.v1 import worker_pb2

from scheduler_svc.adapters.loss_rules import WorkerHealth
from scheduler_svc.adapters.worker_life import WorkerLife
from scheduler_svc.core.ready import Ready, StepPlan
from scheduler_svc.core.types import CostProfile, WorkerId
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
