"""Workers come, drain, fail and die; several share the work."""

import pytest

from scheduler_svc.core.events import (
    StepCompleted,
    StepFailed,
    WorkerDraining,
    WorkerLost,
)
from scheduler_svc.core.types import FaultScope, FinishReason, WorkerId
from tests.builders import expected_output, make_core, make_request
from tests.cluster import Cluster

DEPTHS = [1, 2, 4, 8]


def cluster(depth: int = 1, **config: object) -> Cluster:
    return Cluster(make_core(max_inflight_steps=depth, **config))


def drain(c: Cluster, name: str) -> None:
    c.feed(WorkerDraining(now_ns=c.now_ns, worker_id=WorkerId(name)))


def served(c: Cluster, name: str) -> int:
    """Rows with tokens that a worker has computed."""
    return sum(len(step) for step in c.workers[WorkerId(name)].steps)


# Losing a worker


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_steps", range(1, 7))
def test_requests_of_a_lost_worker_go_on_elsewhere_without_a_gap(
    depth: int, num_steps: int
) -> None:
    c = cluster(depth)
    c.begin("w0", max_num_batched_tokens=8)
    arrivals = [
        make_request("a", prompt=9, max_tokens=7, stop_after=5),
        make_request("b", prompt=9, max_tokens=7),
    ]
    for arrival in arrivals:
        c.arrive(arrival)
    c.steps(num_steps, "w0")
    running = [a for a in arrivals if c.end(a.request_id.decode()) is None]
    c.lose("w0")
    c.begin("w1")
    c.run()
    for arrival in arrivals:
        name = arrival.request_id.decode()
        assert (c.output(name), c.end(name)) == expected_output(arrival)
        assert c.finish(name).attempt == (2 if arrival in running else 1)
    assert c.core.stats.num_recovered == len(running)
    c.assert_idle()


def test_the_next_attempt_repeats_the_output_from_its_start() -> None:
    c = cluster()
    c.begin("w0")
    c.arrive(make_request("a", prompt=9, max_tokens=7, outputs=2))
    c.steps(3, "w0")
    c.lose("w0")
    c.join("w1")
    (admit,) = c.last.plans[0].admits
    assert (admit.attempt, admit.emit_from) == (2, 0)
    assert len(admit.token_ids) == 9 + 2 + 3


@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_a_repeat_that_a_failed_step_kept_back_is_not_left_out(num_chunks: int) -> None:
    """The new session has emitted nothing yet: it still owes the output from its start."""
    c = cluster()
    lost = c.begin("w0")
    c.arrive(make_request("a", prompt=9, max_tokens=7))
    for _ in range(3):
        c.feed(lost.next_result(now_ns=c.now_ns))
    c.lose("w0")
    c.join("w1", max_num_batched_tokens=5)
    c.steps(num_chunks, "w1")
    c.step("w1", fail=True)
    (admit,) = c.last.plans[0].admits
    # 9 + 3 tokens in chunks of 5: only the third one samples.
    assert (admit.attempt, admit.emit_from, len(admit.token_ids)) == (2, 0, 12)
    c.run()
    assert (c.output("a"), c.end("a")) == expected_output(make_request("a", max_tokens=7))


def test_a_repeat_that_a_preemption_kept_back_is_not_left_out() -> None:
    c = cluster(watermark=0.0, enable_prefix_caching=False, prefill_chunk_tokens=2)
    lost = c.begin("w0")
    arrival = make_request("a", prompt=13, max_tokens=7)
    c.arrive(arrival)
    for _ in range(9):
        c.feed(lost.next_result(now_ns=c.now_ns))
    c.lose("w0")
    c.join("w1", num_blocks=7, block_size=4, max_num_batched_tokens=3)
    c.arrive(make_request("first", prompt=10, max_tokens=6, priority=-1))
    c.run(until=lambda: c.core.stats.num_preemptions > 0)
    assert c.output("a") == []
    c.run(until=lambda: any(plan.admits for plan in c.last.plans))
    (admit,) = c.last.plans[0].admits
    assert (admit.attempt, admit.emit_from, len(admit.token_ids)) == (2, 0, 16)
    c.run()
    assert (c.output("a"), c.end("a")) == expected_output(arrival)


@pytest.mark.parametrize("heard", ["gateway", "scheduler"])
def test_an_end_that_only_one_side_hears_from_a_dying_worker_is_given_once(heard: str) -> None:
    """The last batch gets through and not the last result, or the other way round."""
    c = cluster()
    lost = c.begin("w0")
    arrival = make_request("a", prompt=9, max_tokens=3)
    c.arrive(arrival)
    c.steps(2, "w0")
    event = lost.next_result(now_ns=c.now_ns)
    if heard == "gateway":
        c.deliver(lost)
        assert (c.output("a"), c.end("a")) == expected_output(arrival)
    else:
        c.feed(event)
        assert c.finish("a").reason is FinishReason.LENGTH
        assert c.end("a") is None
    c.lose("w0")
    c.begin("w1")
    if heard == "scheduler":
        c.supersede("a")
    c.run()
    assert (c.output("a"), c.end("a")) == expected_output(arrival)
    c.assert_idle()


def test_a_request_that_never_ran_keeps_its_attempt() -> None:
    c = cluster()
    c.begin("w0", num_slots=1)
    c.arrive(make_request("a"))
    c.arrive(make_request("b"))
    c.lose("w0")
    c.begin("w1")
    c.run()
    assert [c.finish(name).attempt for name in "ab"] == [2, 1]


def test_a_worker_that_joins_anew_is_a_new_session() -> None:
    c = cluster(2)
    c.begin("w")
    c.arrive(make_request("a", max_tokens=6))
    c.steps(2)
    c.join("w")
    assert c.last.plans[0].reset
    c.run()
    assert c.finish("a").attempt == 2
    assert (c.output("a"), c.end("a")) == expected_output(make_request("a", max_tokens=6))


@pytest.mark.parametrize("with_tokens", [False, True])
def test_losses_without_a_new_token_are_bounded(with_tokens: bool) -> None:
    c = cluster()
    c.begin()
    c.arrive(make_request("a", max_tokens=20))
    for _ in range(10):
        if c.end("a"):
            break
        if with_tokens:
            c.step()
        c.lose("w")
        c.join("w")
    if with_tokens:
        assert c.end("a") is None
        c.run()
        assert c.end("a") is FinishReason.LENGTH
        return
    finish = c.finish("a")
    assert (finish.reason, finish.notify) == (FinishReason.ERROR, True)
    assert "3 times" in finish.message


def test_attempts_are_bounded_in_all() -> None:
    c = cluster(max_attempts=4)
    c.begin()
    c.arrive(make_request("a", max_tokens=50))
    for _ in range(20):
        if c.end("a"):
            break
        c.step()
        c.lose("w")
        c.join("w")
    assert (c.end("a"), c.finish("a").attempt) == (FinishReason.ERROR, 4)
    assert "4" in c.finish("a").message


def test_results_of_a_lost_or_unknown_worker_are_dropped() -> None:
    c = cluster(2)
    c.begin()
    c.arrive(make_request("a"))
    late = c.result()
    c.lose("w")
    c.feed(late)
    c.feed(StepCompleted(now_ns=0, worker_id=WorkerId("nobody"), step=1))
    c.feed(
        StepFailed(
            now_ns=0,
            worker_id=WorkerId("nobody"),
            step=1,
            scope=FaultScope.WORKER,
            reason="",
        )
    )
    c.feed(WorkerLost(now_ns=0, worker_id=WorkerId("nobody")))
    drain(c, "nobody")
    assert c.core.stats.num_stale_results == 3
    c.begin("w")
    c.feed(late)
    c.run()
    assert c.end("a") is FinishReason.LENGTH


def test_a_result_that_comes_twice_counts_once() -> None:
    c = cluster(2)
    c.begin()
    c.arrive(make_request("a", max_tokens=4))
    while c.end("a") is None:
        event = c.result()
        c.feed(event)
        c.feed(event)
    assert c.output("a") == expected_output(make_request("a", max_tokens=4))[0]
    assert c.core.stats.num_generation_tokens == 4


# Preemption within a session


def test_the_same_session_after_preemption_goes_on_where_it_was() -> None:
    c = cluster(watermark=0.0, enable_prefix_caching=False)
    c.begin(num_blocks=6, block_size=4)
    c.arrive_together(
        make_request("first", prompt=10, max_tokens=8),
        make_request("second", prompt=10, max_tokens=8),
    )
    c.run(until=lambda: c.core.stats.num_preemptions > 0)
    given = len(c.output("second"))
    assert given > 0
    c.run(until=lambda: any(p.admits for p in c.last.plans))
    (admit,) = c.last.plans[0].admits
    assert (admit.attempt, admit.emit_from) == (1, given)
    c.run()
    assert c.gateway.num_repeats == 0


def test_a_preempted_request_that_moves_to_another_worker_repeats_all() -> None:
    c = cluster(watermark=0.0, enable_prefix_caching=False)
    c.begin("w0", num_blocks=6, block_size=4)
    c.arrive_together(
        make_request("first", prompt=10, max_tokens=8),
        make_request("second", prompt=10, max_tokens=8),
    )
    c.run(until=lambda: c.core.stats.num_preemptions > 0)
    given = len(c.output("second"))
    c.begin("w1")
    c.run()
    assert c.finish("second").attempt == 2
    assert c.gateway.num_repeats == given
    assert c.output("second") == expected_output(make_request("second", max_tokens=8))[0]


# Failing steps


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_steps", range(5))
def test_after_a_failed_step_the_worker_starts_from_nothing(depth: int, num_steps: int) -> None:
    c = cluster(depth)
    worker = c.begin(max_num_batched_tokens=8)
    arrivals = [make_request(n, prompt=9, max_tokens=6) for n in "ab"]
    for arrival in arrivals:
        c.arrive(arrival)
    c.steps(num_steps)
    ready = c.step(fail=True)
    assert [p.reset for p in ready.plans] == [True] + [False] * (len(ready.plans) - 1)
    c.run()
    for arrival in arrivals:
        name = arrival.request_id.decode()
        assert (c.output(name), c.end(name)) == expected_output(arrival)
        # The session has delivered what it emitted: nothing is repeated.
        assert c.finish(name).attempt == 1
    assert c.gateway.num_repeats == 0
    assert c.core.stats.num_failed_steps == 1
    assert worker.slots == {}
    c.assert_idle()


def test_a_worker_is_given_up_after_failing_steps_in_a_row() -> None:
    c = cluster(2, max_step_failures=3)
    c.begin("w0")
    c.arrive(make_request("a"))
    c.step("w0", fail=True)
    c.step("w0")
    c.step("w0")
    for _ in range(20):
        if c.given_up:
            break
        c.step("w0", fail=True)
    assert (c.given_up, c.why_given_up) == (["w0"], ["3 steps in a row failed"])
    assert c.core.stats.num_failed_steps == 4
    c.begin("w1")
    c.run()
    assert (c.output("a"), c.end("a")) == expected_output(make_request("a"))


def test_a_request_whose_steps_always_fail_is_answered() -> None:
    c = cluster()
    c.arrive(make_request("a"))
    for _ in range(200):
        if c.end("a"):
            break
        if not c.workers:
            c.join("w")
        c.step(fail=bool(c.workers[WorkerId("w")].plans[0].num_rows))
    assert c.end("a") is FinishReason.ERROR
    assert c.core.stats.num_failed_steps == 9


def test_losses_count_on_when_a_gateway_asks_anew() -> None:
    """It asks whenever a worker goes, or what kills workers would go on for ever."""
    c = cluster()
    c.arrive(make_request("a"))
    for _ in range(20):
        if c.end("a"):
            break
        c.join("w")
        c.lose("w")
        if c.end("a") is None:
            c.supersede("a")
    assert c.end("a") is FinishReason.ERROR
    assert c.core.stats.num_recovered == 3


def test_a_broken_worker_is_given_up_at_once() -> None:
    c = cluster()
    worker = c.begin("w0")
    c.arrive(make_request("a"))
    ready = c.feed(
        StepFailed(
            now_ns=0,
            worker_id=WorkerId("w0"),
            step=worker.plans[0].step,
            scope=FaultScope.WORKER,
            reason="device",
        )
    )
    assert [given_up.worker_id for given_up in ready.given_up] == ["w0"]
    c.begin("w1")
    c.run()
    assert c.finish("a").attempt == 2


# Draining


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_draining_worker_hands_over(depth: int) -> None:
    c = cluster(depth)
    c.begin("w0")
    arrivals = [make_request(n, prompt=9, max_tokens=12) for n in "ab"]
    for arrival in arrivals:
        c.arrive(arrival)
    c.steps(3, "w0")
    c.begin("w1")
    drain(c, "w0")
    c.arrive(make_request("new"))
    c.run()
    for arrival in arrivals:
        name = arrival.request_id.decode()
        assert (c.output(name), c.end(name)) == expected_output(arrival)
        assert c.finish(name).attempt == 2
    assert not c.workers[WorkerId("w0")].slots
    assert c.core.view().workers[0].draining
    assert not any(f.reason is FinishReason.ERROR for f in c.finishes.values())


def test_the_last_worker_serves_on_while_it_drains_but_takes_nothing_new() -> None:
    c = cluster()
    c.begin()
    c.arrive(make_request("a", max_tokens=6))
    c.step()
    drain(c, "w")
    c.arrive(make_request("b"))
    c.run()
    assert (c.end("a"), c.end("b")) == (FinishReason.LENGTH, None)
    c.lose("w")
    c.begin("w2")
    c.run()
    assert c.end("b") is FinishReason.LENGTH


# Sharing the work


def test_equal_workers_share_the_load() -> None:
    c = cluster(enable_prefix_caching=False)
    for name in ("w0", "w1"):
        c.begin(name)
    c.arrive_together(*(make_request(f"r{i}", prompt=8, max_tokens=8) for i in range(8)))
    c.run()
    assert served(c, "w0") == served(c, "w1") == 32


def test_a_prefix_hit_draws_a_request_to_the_worker_that_has_it() -> None:
    c = cluster()
    c.begin("w0")
    c.arrive(make_request("a", prompt=40, family=1, max_tokens=1))
    c.run()
    c.begin("w1")
    c.arrive(make_request("busy", prompt=4, max_tokens=40))
    c.arrive(make_request("b", prompt=44, family=1, max_tokens=2))
    assert served(c, "w1") == 0
    c.run()
    assert c.finish("b").num_cached_tokens == 40


def test_load_outweighs_a_small_hit() -> None:
    c = cluster()
    c.begin("w0", num_slots=8)
    c.arrive(make_request("a", prompt=8, family=1, max_tokens=1))
    c.run()
    c.arrive_together(*(make_request(f"r{i}", prompt=4, max_tokens=30) for i in range(4)))
    c.begin("w1")
    c.arrive(make_request("b", prompt=9, family=1, max_tokens=2))
    c.run(until=lambda: c.end("b") is not None)
    assert served(c, "w1") == 2


def test_a_request_too_large_for_one_worker_goes_to_the_other() -> None:
    c = cluster()
    c.begin("w0", num_blocks=8)
    c.begin("w1", num_blocks=80)
    for i in range(3):
        c.arrive(make_request(f"r{i}", prompt=60, max_tokens=2))
    c.run()
    assert served(c, "w0") == 0
    assert len(c.finishes) == 3


def test_workers_may_differ_in_block_size() -> None:
    c = cluster(watermark=0.0)
    c.begin("w0", block_size=4, num_blocks=8)
    c.begin("w1", block_size=16, num_blocks=8)
    for i in range(6):
        c.arrive(make_request(f"r{i}", prompt=20, family=1, max_tokens=8))
    c.run()
    for i in range(6):
        assert c.output(f"r{i}") == expected_output(make_request(f"r{i}", max_tokens=8))[0]


def test_a_request_whose_later_chunk_always_fails_ends_alone() -> None:
    """Its earlier chunks succeed, so that the steps do not fail one after the other."""
    c = cluster(enable_prefix_caching=False, max_step_failures=4)
    c.begin(max_num_batched_tokens=8)
    good, poison = make_request("good", prompt=6, max_tokens=200), make_request("bad", prompt=24)
    c.arrive(good)
    c.arrive(poison)
    for _ in range(400):
        if c.end("good") is not None:
            break
        known = c.core.explain(poison.request_id)
        c.step(fail=known is not None and known.num_computed_tokens > 16)
    assert c.end("bad") is FinishReason.ERROR
    assert c.finish("bad").message.startswith("12 steps with the request failed")
    assert (c.output("good"), c.end("good")) == expected_output(good)


def test_the_order_of_a_snapshot_does_not_matter() -> None:
    """A trace keeps mappings sorted: the replay must give the same plan."""
    plans = []
    for names in ("ab", "ba"):
        c = cluster()
        c.begin("w0")
        for name in "ab":
            c.arrive(make_request(name, prompt=6, max_tokens=20))
        c.step("w0")
        attempts = {make_request(name, prompt=6).request_id: 5 for name in names}
        c.join("w1", snapshot_attempts=attempts)
        plans.append(c.step("w0").plans)
    assert plans[0] == plans[1]
