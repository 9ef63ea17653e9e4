"""What a step costs, counted in Python function calls: no clock, so no flakiness.

A decode step at 256 running requests must not make calls for each row, and must not look at the
waiting queue while all slots are taken.
"""

import sys
from types import FrameType
from typing import Any

import pytest

from scheduler_svc.core.events import Event
from scheduler_svc.core.ready import Ready
from tests.builders import make_core, make_request
from tests.cluster import MS, Cluster

NUM_ROWS = 256
BLOCK_SIZE = 16
# Calls for planning a step and booking its result, whatever the number of rows: measured 33.
MAX_CALLS = 45
# More for a row that takes a block or fills one: measured 9 on average.
MAX_CALLS_PER_BLOCK = 11


def running(num_waiting: int = 0, num_rows: int = NUM_ROWS, **request: Any) -> Cluster:
    """All slots decode; prompts differ in length so that each step a sixteenth take a block."""
    cluster = Cluster(make_core(max_inflight_steps=2, hash_key=b"k"))
    cluster.begin(
        num_slots=num_rows,
        num_blocks=num_rows * 16,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=8192,
        max_model_len=4096,
    )
    cluster.arrive_together(
        *(
            make_request(f"r{i}", prompt=17 + i % BLOCK_SIZE, max_tokens=200, **request)
            for i in range(num_rows + num_waiting)
        )
    )
    cluster.steps(4)
    assert cluster.core.view().num_running == num_rows
    assert cluster.core.view().num_waiting == num_waiting
    return cluster


def count_calls(cluster: Cluster, event: Event) -> tuple[int, Ready]:
    """Python calls of feed and take_ready together."""
    count = 0

    def tally(frame: FrameType, what: str, arg: object) -> None:
        nonlocal count
        count += what == "call"

    sys.setprofile(tally)
    try:
        cluster.core.feed(event)
        ready = cluster.core.take_ready()
    finally:
        sys.setprofile(None)
    return count, ready


def calls_of_steps(cluster: Cluster, num_steps: int) -> tuple[list[int], list[int]]:
    """Calls of some steps, and how many rows took or filled a block in each."""
    counts, blocks = [], []
    for _ in range(num_steps):
        cluster.now_ns += MS
        event = cluster.result()
        count, ready = count_calls(cluster, event)
        (plan,) = ready.plans
        cluster.workers[plan.worker_id].take(plan)
        counts.append(count)
        blocks.append(2 * len(plan.growth))
    return counts, blocks


@pytest.mark.parametrize("num_rows", [16, NUM_ROWS])
def test_a_decode_step_makes_no_calls_for_its_rows(num_rows: int) -> None:
    counts, blocks = calls_of_steps(running(num_rows=num_rows), 32)
    assert sum(blocks) == 2 * 32 * num_rows // BLOCK_SIZE
    for count, num_blocks in zip(counts, blocks, strict=True):
        assert count <= MAX_CALLS + MAX_CALLS_PER_BLOCK * num_blocks


def test_logprobs_cost_the_scheduler_nothing() -> None:
    counts, blocks = calls_of_steps(running(num_rows=16), 32)
    scored = running(num_rows=16, num_logprobs=5, prompt_logprobs=True)
    assert calls_of_steps(scored, 32) == (counts, blocks)


def test_a_full_worker_does_not_look_at_the_waiting_queue() -> None:
    alone, _ = calls_of_steps(running(), 16)
    crowded, _ = calls_of_steps(running(num_waiting=2000), 16)
    # Now and then all are looked at for those that no worker could take: without a call for each.
    assert max(crowded) <= max(alone) + 10
