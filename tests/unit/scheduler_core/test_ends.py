"""Every way a request ends, at every moment: cancel, deadline, stop, error, gateway gone."""

from dataclasses import replace

import pytest

from scheduler_svc.core.deadlines import Deadlines
from scheduler_svc.core.events import (
    GatewayLost,
    RequestCancelled,
    StepCompleted,
    WorkerSubscribed,
)
from scheduler_svc.core.lifecycle import Move
from scheduler_svc.core.types import FinishReason, RequestId, WorkerId
from tests.builders import GATEWAY, expected_output, make_core, make_request
from tests.cluster import MS, Cluster
from tests.unit.scheduler_core.test_waiting import make as make_waiting

DEPTHS = [1, 2, 4, 8]
WAIT_NS = 30_000 * MS


def cluster(depth: int = 1, **config: object) -> Cluster:
    return Cluster(make_core(max_inflight_steps=depth, **config))


def test_a_request_ends_once_with_its_account() -> None:
    c = cluster()
    c.begin()
    c.arrive(make_request("a", prompt=5, max_tokens=3))
    c.run()
    finish = c.finish("a")
    assert (finish.reason, finish.notify, finish.attempt) == (FinishReason.LENGTH, False, 1)
    assert (finish.num_prompt_tokens, finish.num_output_tokens) == (5, 3)
    assert finish.first_scheduled_ns is not None
    assert finish.first_token_ns is not None
    assert (
        finish.arrived_ns
        <= finish.first_scheduled_ns
        < finish.first_token_ns
        < finish.finished_ns
        == finish.first_token_ns + 2 * MS
    )
    assert (c.core.stats.num_prompt_tokens, c.core.stats.num_generation_tokens) == (5, 3)
    c.assert_idle()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("stop_after", [1, 2, 5])
def test_a_stop_token_seen_late_costs_one_wasted_row_for_each_step_ahead(
    depth: int, stop_after: int
) -> None:
    c = cluster(depth)
    worker = c.begin()
    c.arrive(make_request("a", max_tokens=20, stop_after=stop_after))
    c.run()
    assert c.end("a") is FinishReason.STOP
    assert len(c.output("a")) == stop_after
    assert worker.num_wasted_rows == c.core.stats.num_wasted_rows == depth - 1
    c.assert_idle()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_an_end_by_length_is_known_and_costs_nothing(depth: int, max_tokens: int) -> None:
    c = cluster(depth)
    worker = c.begin()
    c.arrive(make_request("a", max_tokens=max_tokens))
    c.run()
    assert (len(c.output("a")), c.end("a")) == (max_tokens, FinishReason.LENGTH)
    assert worker.num_wasted_rows == 0
    assert len(worker.steps) == max_tokens


def test_min_tokens_is_the_workers_to_honour() -> None:
    c = cluster()
    c.begin()
    c.arrive(make_request("a", max_tokens=5, stop_after=2, min_tokens=3))
    c.run()
    assert (len(c.output("a")), c.end("a")) == (5, FinishReason.LENGTH)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("on_worker", [False, True])
@pytest.mark.parametrize("num_steps", range(7))
def test_a_cancel_at_any_moment_frees_everything(
    depth: int, num_steps: int, on_worker: bool
) -> None:
    """20 prompt tokens in chunks of 8, then decodes; a second request must not notice."""
    c = cluster(depth)
    worker = c.begin(max_num_batched_tokens=8)
    arrival = make_request("other", prompt=3, max_tokens=9)
    c.arrive(make_request("a", prompt=20, max_tokens=4))
    c.arrive(arrival)
    c.steps(num_steps)
    if on_worker:
        worker.cancel(RequestId(b"a"))
    ready = c.cancel("a")
    if c.end("a") is FinishReason.CANCELLED:
        (finish,) = ready.finishes
        assert (finish.reason, finish.notify) == (FinishReason.CANCELLED, False)
    c.cancel("a")
    c.run()
    assert len(c.finishes) == 2
    assert (c.output("other"), c.end("other")) == expected_output(arrival)
    c.assert_idle()


def test_a_cancel_while_preempted_or_of_an_unknown_request() -> None:
    c = cluster(2, watermark=0.0, enable_prefix_caching=False)
    c.begin(num_blocks=6, block_size=4)
    c.feed(RequestCancelled(now_ns=0, request_id=RequestId(b"nobody")))
    c.arrive_together(
        make_request("first", prompt=10, max_tokens=8),
        make_request("second", prompt=10, max_tokens=8),
    )
    c.run(until=lambda: c.core.stats.num_preemptions > 0)
    assert len(c.cancel("second").finishes) == 1
    c.run()
    assert len(c.finishes) == 2
    c.assert_idle()


def test_a_row_ended_on_the_worker_before_the_core_knows_ends_and_is_not_shared() -> None:
    """Results overtake the cancel and name the row; the KV of its later chunks is not there."""
    c = cluster()
    worker = c.begin(max_num_batched_tokens=8)
    c.arrive(make_request("a", prompt=24, family=1, max_tokens=4))
    c.step()
    worker.cancel(RequestId(b"a"))
    c.step()
    assert (c.finish("a").reason, c.finish("a").notify) == (FinishReason.CANCELLED, False)
    c.arrive(make_request("b", prompt=24, family=1, max_tokens=2))
    c.run()
    assert c.finish("b").num_cached_tokens == 8
    assert c.end("b") is FinishReason.LENGTH


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_chunk_beside_one_that_was_left_out_counts_as_computed(depth: int) -> None:
    """A client that leaves costs the requests beside it nothing of their prefix cache."""
    c = cluster(depth, prefill_chunk_tokens=8)
    worker = c.begin(max_num_batched_tokens=16)
    c.arrive_together(
        make_request("a", prompt=40, family=1, max_tokens=4),
        make_request("gone", prompt=40, family=2, max_tokens=40),
    )
    c.steps(2)
    worker.cancel(RequestId(b"gone"))
    c.run(until=lambda: c.end("a") is not None)
    c.arrive(make_request("b", prompt=40, family=1, max_tokens=2))
    c.run(until=lambda: c.end("b") is not None)
    assert c.finish("gone").reason is FinishReason.CANCELLED
    assert c.finish("b").num_cached_tokens == 36


def test_a_request_that_fails_on_the_worker_is_not_shared() -> None:
    c = cluster()
    worker = c.begin()
    (plan,) = c.arrive(make_request("a", prompt=16, family=1, max_tokens=4)).plans
    event = worker.next_result()
    assert isinstance(event, StepCompleted)
    worker.outbox.clear()
    slot = plan.admits[0].slot
    c.feed(replace(event, slots=(), token_ids=(), finished=((slot, FinishReason.ERROR),)))
    assert (c.finish("a").reason, c.finish("a").notify) == (FinishReason.ERROR, False)
    c.arrive(make_request("b", prompt=16, family=1, max_tokens=2))
    c.run()
    assert c.finish("b").num_cached_tokens == 0


@pytest.mark.parametrize("num_steps", range(5))
def test_a_deadline_ends_a_request_wherever_it_stands(num_steps: int) -> None:
    c = cluster(2)
    c.begin(max_num_batched_tokens=8)
    deadline_ns = c.now_ns + 10 * MS
    ready = c.arrive(make_request("a", prompt=20, max_tokens=40, deadline_ns=deadline_ns))
    assert ready.wake_at_ns == deadline_ns
    c.steps(num_steps)
    c.advance(deadline_ns - c.now_ns - 1)
    assert c.end("a") is None
    (finish,) = c.advance(1).finishes
    assert (finish.reason, finish.notify) == (FinishReason.DEADLINE, True)
    assert c.last.wake_at_ns is None
    c.run()
    c.assert_idle()


def test_a_deadline_that_has_passed_on_arrival() -> None:
    c = cluster()
    c.begin()
    c.advance(50 * MS)
    (finish,) = c.arrive(make_request("a", deadline_ns=20 * MS)).finishes
    assert finish.reason is FinishReason.DEADLINE


def test_a_superseding_entry_brings_its_own_deadline() -> None:
    c = cluster()
    c.begin(max_num_batched_tokens=1)
    c.arrive(make_request("a", prompt=40, deadline_ns=20 * MS))
    c.feed(make_request("a", prompt=40, deadline_ns=60 * MS, attempt=2))
    assert not c.advance(30 * MS).finishes
    assert c.advance(30 * MS).finishes[0].reason is FinishReason.DEADLINE


def test_the_deadline_of_an_ended_request_wakes_nobody() -> None:
    c = cluster()
    c.begin()
    c.arrive(make_request("a", deadline_ns=10**12))
    c.run()
    assert c.round().wake_at_ns is None


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    deadlines = Deadlines()
    first = make_waiting(0, deadline_ns=1)
    deadlines.add(first)
    for i in range(1, 5000):
        request = make_waiting(i, deadline_ns=1000 + i)
        deadlines.add(request)
        request.move(Move.FINISH)
        assert len(deadlines) <= 1025
    assert deadlines.next_ns() == 1
    assert deadlines.pop_due(0) is None
    assert deadlines.pop_due(1) is first
    assert deadlines.pop_due(10**9) is None


def test_time_never_goes_back() -> None:
    c = cluster()
    c.begin()
    c.advance(50 * MS)
    c.core.feed(make_request("a", now_ns=0, max_tokens=1))
    c.gateway.open(make_request("a"))
    c.run()
    assert c.finish("a").arrived_ns == 51 * MS


@pytest.mark.parametrize("case", ["no worker", "no subscription", "too small"])
def test_one_that_no_worker_can_take_is_answered_after_the_wait(case: str) -> None:
    c = cluster(worker_wait_ns=WAIT_NS)
    if case == "no subscription":
        c.begin()
        c.arrive(make_request("a", gateway_id="unread"))
    elif case == "too small":
        c.begin("small", num_blocks=4)
        c.begin("large", num_blocks=40)
        c.core.feed(make_request("a", prompt=100))
        c.gateway.open(make_request("a", prompt=100))
        c.lose("large")
    else:
        c.arrive(make_request("a"))
    for _ in range(1000):
        if c.end("a"):
            break
        assert c.last.wake_at_ns is not None
        c.advance(c.last.wake_at_ns - c.now_ns)
    finish = c.finish("a")
    assert (finish.reason, finish.notify) == (FinishReason.UNAVAILABLE, True)
    waited_ns = finish.finished_ns - finish.arrived_ns
    assert WAIT_NS <= waited_ns <= WAIT_NS + 200 * MS


def test_one_that_has_had_tokens_waits_for_a_worker_as_long_as_it_takes() -> None:
    c = cluster(worker_wait_ns=WAIT_NS)
    c.begin("w0")
    c.arrive(make_request("a", max_tokens=6))
    c.steps(3, "w0")
    c.lose("w0")
    for _ in range(5):
        c.advance(WAIT_NS)
    assert c.end("a") is None
    c.begin("w1")
    c.run()
    assert (c.output("a"), c.end("a")) == expected_output(make_request("a", max_tokens=6))


def test_a_wait_that_was_interrupted_starts_anew() -> None:
    c = cluster(worker_wait_ns=WAIT_NS)
    c.arrive(make_request("a", gateway_id="g2"))
    c.advance(1)
    c.advance(WAIT_NS - MS)
    c.begin("w", gateways=(GATEWAY,), num_slots=1)
    c.arrive(make_request("b", max_tokens=200))
    name = WorkerId("w")
    c.feed(WorkerSubscribed(now_ns=c.now_ns, worker_id=name, gateway_ids=frozenset({"g2"})))
    c.advance(200 * MS)
    c.feed(WorkerSubscribed(now_ns=c.now_ns, worker_id=name, gateway_ids=frozenset()))
    c.advance(200 * MS)
    c.advance(WAIT_NS - 300 * MS)
    assert c.end("a") is None
    c.advance(400 * MS)
    assert c.end("a") is FinishReason.UNAVAILABLE


def test_requests_of_a_lost_gateway_are_given_up() -> None:
    c = cluster(2)
    c.begin(gateways=(GATEWAY, "g2"), num_slots=2)
    for name in ("a", "b"):
        c.arrive(make_request(name, max_tokens=20, gateway_id="g2"))
        c.arrive(make_request(f"{name}2", max_tokens=5))
    c.steps(3)
    finishes = c.feed(GatewayLost(now_ns=c.now_ns, gateway_id="g2")).finishes
    assert {(f.entry_id, f.reason, f.notify) for f in finishes} == {
        ("a-1", FinishReason.CANCELLED, False),
        ("b-1", FinishReason.CANCELLED, False),
    }
    for stream in c.gateway.streams.values():
        if stream.arrival.gateway_id == "g2":
            stream.end = FinishReason.CANCELLED
    c.run()
    assert c.end("a2") is c.end("b2") is FinishReason.LENGTH
    c.assert_idle()


def test_only_workers_that_the_gateway_reads_are_used() -> None:
    c = cluster()
    unread = c.begin("unread", gateways=("g2",))
    read = c.begin("read", gateways=(GATEWAY,), num_slots=1)
    for name in "abc":
        c.arrive(make_request(name))
    c.run()
    assert not unread.steps
    assert len(read.steps) == 9


def test_many_requests_without_a_reader_do_not_hold_up_the_others() -> None:
    c = cluster()
    c.begin()
    for i in range(200):
        c.arrive(make_request(f"unread{i}", gateway_id="g2"))
    c.arrive(make_request("a"))
    c.run()
    assert c.end("a") is FinishReason.LENGTH
