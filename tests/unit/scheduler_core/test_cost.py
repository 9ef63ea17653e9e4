"""What a step costs, counted in Python function calls: no clock, so no flakiness.

A decode step at 256 running requests must not make calls for each row, and must not look at the
waiting queue while all slots are taken.
"""

import sys
from types import FrameType
from typing import Any

import pytest

from scheduler_svc.core.events import Event, RequestCancelled
from scheduler_svc.core.ready import Ready
from tests.builders import make_core, make_request
from tests.cluster import MS, Cluster

NUM_ROWS = 256
BLOCK_SIZE = 16
# Calls for planning a step and booking its result, whatever the number of rows: measured 49.
MAX_CALLS = 49
# More for a row that takes a block and one that fills one: measured 1.
MAX_CALLS_PER_BLOCK = 1
# For a request that is admitted while one leaves: measured 53.
MAX_CALLS_PER_REQUEST = 53
# For both, until the result with its first token has been booked, three steps: measured 72.
MAX_CALLS_UNTIL_FIRST_TOKEN = 72
# For one that comes and waits: measured 14.
MAX_CALLS_PER_ARRIVAL = 14


def running(
    num_waiting: int = 0,
    num_rows: int = NUM_ROWS,
    config: dict[str, Any] | None = None,
    **request: Any,
) -> Cluster:
    """All slots decode; prompts differ in length so that each step a sixteenth take a block."""
    cluster = Cluster(make_core(max_inflight_steps=2, hash_key=b"k", **(config or {})))
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


def count_calls(cluster: Cluster, *events: Event) -> tuple[int, Ready]:
    """Python calls of feed and take_ready together."""
    count = 0

    def tally(frame: FrameType, what: str, arg: object) -> None:
        nonlocal count
        count += what == "call"

    sys.setprofile(tally)
    try:
        for event in events:
            cluster.core.feed(event)
        ready = cluster.core.take_ready()
    finally:
        sys.setprofile(None)
    return count, ready


def calls_of_steps(cluster: Cluster, num_steps: int) -> tuple[list[int], list[int]]:
    """Calls of some steps, and how many rows took a block in each."""
    counts, blocks = [], []
    for _ in range(num_steps):
        cluster.now_ns += MS
        event = cluster.result()
        count, ready = count_calls(cluster, event)
        (plan,) = ready.plans
        cluster.workers[plan.worker_id].take(plan)
        counts.append(count)
        blocks.append(len(plan.growth))
    return counts, blocks


@pytest.mark.parametrize("num_rows", [16, NUM_ROWS])
def test_a_decode_step_makes_no_calls_for_its_rows(num_rows: int) -> None:
    counts, blocks = calls_of_steps(running(num_rows=num_rows), 32)
    assert sum(blocks) == 32 * num_rows // BLOCK_SIZE
    for count, num_blocks in zip(counts, blocks, strict=True):
        assert count <= MAX_CALLS + MAX_CALLS_PER_BLOCK * num_blocks


@pytest.mark.parametrize("policy", ["fair", "static"])
def test_no_policy_costs_calls_for_rows(policy: str) -> None:
    config = {"scheduling_policy": policy, "static_batch_size": NUM_ROWS}
    counts, blocks = calls_of_steps(running(config=config), 16)
    for count, num_blocks in zip(counts, blocks, strict=True):
        assert count <= MAX_CALLS + MAX_CALLS_PER_BLOCK * num_blocks + 4


@pytest.mark.parametrize("num_rows", [16, NUM_ROWS])
def test_a_request_that_comes_and_one_that_goes_cost_the_same_beside_any_number(
    num_rows: int,
) -> None:
    c = running(num_rows=num_rows, num_waiting=1)
    usual = calls_of_steps(c, 1)[0][0]
    c.now_ns += MS
    event = c.result()
    goes = RequestCancelled(now_ns=c.now_ns, request_id=make_request("r3").request_id)
    count, ready = count_calls(c, event, goes)
    assert [len(plan.admits) for plan in ready.plans] == [1]
    assert count <= usual + MAX_CALLS_PER_REQUEST


@pytest.mark.parametrize("num_rows", [16, NUM_ROWS])
def test_an_arrival_costs_the_same_beside_any_number(num_rows: int) -> None:
    c = running(num_rows=num_rows, num_waiting=num_rows)
    nothing, _ = count_calls(c)
    count, ready = count_calls(c, make_request("comes", prompt=40, max_tokens=200))
    assert not ready.plans
    assert count <= nothing + MAX_CALLS_PER_ARRIVAL


@pytest.mark.parametrize("num_rows", [16, NUM_ROWS])
def test_a_request_costs_as_little_until_it_has_its_first_token(num_rows: int) -> None:
    c = running(num_rows=num_rows, num_waiting=1)
    c.now_ns += MS
    goes = RequestCancelled(now_ns=c.now_ns, request_id=make_request("r3").request_id)
    count, ready = count_calls(c, goes)
    assert not ready.plans
    counts, blocks = calls_of_steps(c, 3)
    new = c.core.explain(make_request(f"r{num_rows}").request_id)
    assert new is not None
    assert new.num_output_tokens == 1
    usual = 3 * MAX_CALLS + MAX_CALLS_PER_BLOCK * sum(blocks)
    assert count + sum(counts) <= usual + MAX_CALLS_UNTIL_FIRST_TOKEN


def test_logprobs_cost_the_scheduler_nothing() -> None:
    counts, blocks = calls_of_steps(running(num_rows=16), 32)
    scored = running(num_rows=16, num_logprobs=5, prompt_logprobs=True)
    assert calls_of_steps(scored, 32) == (counts, blocks)


def test_a_full_worker_does_not_look_at_the_waiting_queue() -> None:
    alone, _ = calls_of_steps(running(), 16)
    crowded, _ = calls_of_steps(running(num_waiting=2000), 16)
    # Now and then all are looked at for those that no worker could take: without a call for each.
    assert max(crowded) <= max(alone) + 10


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_of_many_that_do_not_fit_a_few_are_looked_at(policy: str) -> None:
    counts = []
    for num_waiting in (100, 2000):
        c = Cluster(make_core(max_inflight_steps=1, scheduling_policy=policy))
        c.begin(num_slots=8, num_blocks=40, block_size=BLOCK_SIZE)
        c.arrive(make_request("runs", prompt=400, max_tokens=200))
        c.arrive_together(
            *(
                make_request(f"r{i}", prompt=500, max_tokens=9, tenant=f"t{i % 20}")
                for i in range(num_waiting)
            )
        )
        c.steps(10)
        c.now_ns += MS
        counts.append(count_calls(c, c.result())[0])
    assert counts[1] <= counts[0] + 10


def test_of_a_burst_not_each_request_is_matched_with_each_worker() -> None:
    """Those that go to an emptier worker are seen to do so by its load."""
    c = Cluster(make_core(max_inflight_steps=1))
    for number in range(16):
        c.begin(f"w{number}", num_slots=256, num_blocks=4096, max_num_batched_tokens=4096)
    c.arrive_together(*(make_request(f"r{i}", max_tokens=90) for i in range(2000)))
    for number in range(16):
        c.step(f"w{number}")
    c.now_ns += MS
    count, ready = count_calls(c, c.result("w3"))
    num_admitted = sum(len(plan.admits) for plan in ready.plans)
    assert 0 < num_admitted <= 16
    assert c.core.view().num_waiting > 64
    # Each that is looked at and left makes about 30 calls; a match with each worker makes 240.
    assert count <= 64 * 32 + num_admitted * 120


@pytest.mark.parametrize("what", ["no room", "held back"])
def test_long_prompts_that_wait_are_not_matched_in_each_step(what: str) -> None:
    """64 of 63 blocks each are looked at; a match makes a call for each block that it finds."""
    c = Cluster(make_core(max_inflight_steps=1, prefill_chunk_tokens=160, watermark=0.0))
    c.begin(
        num_slots=100,
        num_blocks=140,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=4096,
        max_model_len=4000,
    )
    if what == "no room":
        c.arrive(make_request("fills", prompt=1000, family=1, max_tokens=1))
        c.run()
        c.arrive(make_request("runs", prompt=1000, max_tokens=40))
        c.steps(8)
    else:
        c.arrive(make_request("runs", prompt=1000, family=1, max_tokens=40))
    prompt = 2000 if what == "no room" else 1000
    for i in range(64):
        c.arrive(make_request(f"r{i}", prompt=prompt, family=1, max_tokens=9))
    c.steps(4)
    c.now_ns += MS
    count, _ = count_calls(c, c.result())
    assert c.core.view().num_waiting == 64
    assert count <= 64 * 20
