"""Entries of the queue: what is taken, rejected, discarded, superseded."""

import pytest

from scheduler_svc.core.types import FinishReason, RequestId, WorkerId
from tests.builders import expected_output, make_core, make_request, make_worker
from tests.cluster import Cluster


def cluster(depth: int = 1, **config: object) -> Cluster:
    return Cluster(make_core(max_inflight_steps=depth, **config))


def test_a_request_that_exactly_fits_runs_to_its_end() -> None:
    """8 blocks of 4 hold 32 tokens; the last output token needs no room."""
    c = cluster()
    c.begin(num_blocks=8, block_size=4)
    c.arrive(make_request("a", prompt=20, max_tokens=13))
    c.run()
    assert (c.output("a"), c.end("a")) == expected_output(make_request("a", max_tokens=13))


def test_a_request_that_can_never_fit_is_rejected_with_the_numbers() -> None:
    c = cluster()
    c.begin(num_blocks=8, block_size=4)
    (finish,) = c.arrive(make_request("a", prompt=20, max_tokens=14)).finishes
    assert (finish.reason, finish.notify) == (FinishReason.REJECTED, True)
    for number in ("20", "14", "9 KV blocks", "4 tokens", "has 8", "1024"):
        assert number in finish.message
    c.assert_idle()


def test_the_context_length_is_a_limit_too() -> None:
    c = cluster()
    c.begin(max_model_len=32)
    c.arrive(make_request("fits", prompt=20, max_tokens=12))
    c.arrive(make_request("one more", prompt=20, max_tokens=13))
    c.run()
    assert c.end("fits") is FinishReason.LENGTH
    assert c.end("one more") is FinishReason.REJECTED
    assert "context of 32" in c.finish("one more").message


def test_one_worker_that_is_large_enough_is_enough() -> None:
    c = cluster()
    c.begin("small", num_blocks=4)
    c.begin("large", num_blocks=40)
    c.arrive(make_request("a", prompt=100, max_tokens=2))
    c.run()
    assert c.end("a") is FinishReason.LENGTH
    assert len(c.workers["large"].steps) == 3  # type: ignore[index]


def test_without_workers_nothing_is_rejected_until_one_joins() -> None:
    c = cluster()
    c.arrive(make_request("large", prompt=100, max_tokens=2))
    c.arrive(make_request("small", prompt=10, max_tokens=2))
    assert not c.finishes
    c.begin(num_blocks=8, block_size=4)
    assert c.finish("large").reason is FinishReason.REJECTED
    c.run()
    assert c.end("small") is FinishReason.LENGTH


def test_an_empty_prompt_is_rejected() -> None:
    c = cluster()
    c.begin()
    (finish,) = c.arrive(make_request("a", prompt=0)).finishes
    assert (finish.reason, finish.notify) == (FinishReason.REJECTED, True)
    assert "prompt" in finish.message
    c.assert_idle()


def test_a_repeat_of_the_same_entry_is_dropped_without_a_word() -> None:
    c = cluster()
    c.begin()
    arrival = make_request("a", max_tokens=5)
    c.arrive(arrival)
    assert c.feed(arrival).discards == ()
    c.run()
    assert (len(c.finishes), c.core.stats.num_stale_arrivals) == (1, 1)


@pytest.mark.parametrize("attempt", [1, 2])
def test_an_entry_that_says_nothing_new_is_discarded(attempt: int) -> None:
    c = cluster()
    c.begin()
    c.arrive(make_request("a", max_tokens=5, attempt=2))
    ready = c.feed(make_request("a", max_tokens=5, attempt=attempt, entry_id="other"))
    assert ready.discards == ("other",)
    c.run()
    assert list(c.finishes) == ["a-2"]


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_higher_attempt_supersedes_with_the_tokens_given(depth: int, num_steps: int) -> None:
    c = cluster(depth)
    c.begin()
    c.arrive(make_request("a", prompt=9, max_tokens=6))
    c.steps(num_steps)
    c.supersede("a")
    c.run()
    # The old entry was deleted by the gateway: only the new one ends here.
    assert list(c.finishes) == ["a-2"]
    assert c.finish("a", 2).attempt == 2
    assert (c.output("a"), c.end("a")) == expected_output(make_request("a", max_tokens=6))
    assert c.core.stats.num_superseded == 1
    assert c.gateway.num_repeats == 0
    c.assert_idle()


def test_the_new_attempt_emits_from_where_the_client_is() -> None:
    c = cluster()
    c.begin()
    c.arrive(make_request("a", prompt=9, max_tokens=6, outputs=4, attempt=3))
    (admit,) = c.last.plans[0].admits
    assert (admit.attempt, admit.emit_from, len(admit.token_ids)) == (3, 4, 13)
    c.run()
    assert (c.output("a"), c.end("a")) == expected_output(make_request("a", max_tokens=6))


def test_a_superseded_request_keeps_its_place_in_the_order() -> None:
    c = cluster()
    c.begin(num_slots=1)
    for name in "abc":
        c.arrive(make_request(name, max_tokens=3))
    c.supersede("b")
    c.run()
    assert list(c.finishes) == ["a-1", "b-2", "c-1"]
    assert c.finish("b", 2).arrived_ns < c.finish("c").arrived_ns + 1


def test_an_attempt_below_what_the_core_has_raised_is_lifted_above_it() -> None:
    """The core moved the request to attempt 2; the gateway, which saw none of it, asks for 2."""
    c = cluster()
    c.begin("w0")
    c.arrive(make_request("a", max_tokens=6))
    c.lose("w0")
    c.begin("w1")
    c.step("w1")
    c.feed(make_request("a", max_tokens=6, attempt=2))
    (admit,) = c.step("w1").plans[0].admits
    assert admit.attempt == 3


def answer_unheard(c: Cluster, name: str) -> None:
    """A worker answers its plans; its tokens stay in its outbox."""
    worker = c.workers[WorkerId(name)]
    while worker.plans:
        c.feed(worker.next_result(now_ns=c.now_ns))


def test_an_end_that_got_lost_is_asked_for_again_above_every_attempt_used() -> None:
    """The core moved the request and saw it end; the gateway, which saw none of it, asks for 2."""
    c = cluster()
    c.begin("w0")
    c.arrive(make_request("a", max_tokens=3))
    c.lose("w0")
    c.join("w1")
    answer_unheard(c, "w1")
    assert (c.finish("a").attempt, c.end("a"), c.output("a")) == (2, None, [])
    late = c.workers[WorkerId("w1")]
    c.lose("w1")
    c.begin("w2")
    c.supersede("a")
    c.step("w2")
    # w1's tokens come after all, below what w2 emits.
    c.deliver(late)
    assert len(c.output("a")) == 1
    c.run()
    assert c.finish("a", 2).attempt == 3
    assert (c.output("a"), c.end("a")) == expected_output(make_request("a", max_tokens=3))


def test_an_end_that_got_lost_is_asked_for_again_above_what_a_snapshot_showed() -> None:
    c = cluster()
    c.begin("w0")
    c.arrive(make_request("a", max_tokens=3))
    held = {RequestId(b"a"): 6}
    c.join_as(make_worker("w1", snapshot_attempts=held, gateways=(), now_ns=c.now_ns))
    answer_unheard(c, "w0")
    assert (c.finish("a").attempt, c.end("a")) == (7, None)
    c.supersede("a")
    c.run()
    assert c.finish("a", 2).attempt == 8
    assert (c.output("a"), c.end("a")) == expected_output(make_request("a", max_tokens=3))


@pytest.mark.parametrize("outputs", [3, 4])
def test_output_that_is_complete_already_only_needs_its_end(outputs: int) -> None:
    c = cluster()
    c.begin()
    (finish,) = c.arrive(make_request("a", max_tokens=3, outputs=outputs)).finishes
    assert (finish.reason, finish.notify) == (FinishReason.LENGTH, True)
    c.assert_idle()


def test_attempts_held_from_an_earlier_epoch_are_exceeded() -> None:
    held = {RequestId(b"before"): 4, RequestId(b"after"): 7}
    c = cluster()
    c.core.feed(make_request("before", max_tokens=2))
    c.join_as(make_worker(snapshot_attempts=held))
    c.core.feed(make_request("after", max_tokens=2))
    c.core.feed(make_request("other", max_tokens=2))
    admits = [admit for plan in c.last.plans for admit in plan.admits]
    for arrival in ("before", "after", "other"):
        c.gateway.open(make_request(arrival, max_tokens=2))
    c.step()
    admits += [admit for plan in c.last.plans for admit in plan.admits]
    assert {a.request_id: a.attempt for a in admits} == {b"before": 5, b"after": 8, b"other": 1}
    c.run()
    assert c.end("before") is c.end("after") is FinishReason.LENGTH


def test_the_highest_attempt_of_several_snapshots_counts() -> None:
    c = cluster()
    c.join_as(make_worker("w0", snapshot_attempts={RequestId(b"a"): 7}))
    c.join_as(make_worker("w1", snapshot_attempts={RequestId(b"a"): 3}))
    c.arrive(make_request("a"))
    c.run()
    assert c.finish("a").attempt == 8


def test_a_snapshot_raises_the_attempt_of_one_that_runs_elsewhere() -> None:
    """The gateway may have had attempt 6 from the worker that joins late."""
    c = cluster(depth=2)
    c.begin("w0")
    c.arrive(make_request("a", max_tokens=8))
    c.steps(3, "w0")
    c.gateway.streams[RequestId(b"a")].attempt = 6
    c.join_as(make_worker("w1", snapshot_attempts={RequestId(b"a"): 6}, now_ns=c.now_ns))
    c.run()
    assert c.finish("a").attempt == 7
    assert (c.output("a"), c.end("a")) == expected_output(make_request("a", max_tokens=8))


@pytest.mark.parametrize("seen", [4, 5])
def test_a_snapshot_of_an_attempt_that_is_no_later_disturbs_nobody(seen: int) -> None:
    """What runs repeats all that the other worker can have sent under the same one."""
    c = cluster(depth=2)
    c.begin("w0")
    c.arrive(make_request("a", max_tokens=8, attempt=5))
    c.steps(3, "w0")
    c.join_as(make_worker("w1", snapshot_attempts={RequestId(b"a"): seen}, now_ns=c.now_ns))
    c.run()
    assert c.finish("a", attempt=5).attempt == 5
    computed = sum(sum(step.values()) for step in c.workers[WorkerId("w0")].steps)
    assert computed == 4 + 8 - 1


def test_a_snapshot_makes_one_that_ran_here_before_repeat_all() -> None:
    """Preempted on w0, attempt raised by w1's snapshot, back on w0: not from where w0 stopped."""
    c = cluster(watermark=0.0, enable_prefix_caching=False)
    c.begin("w0", num_blocks=6, block_size=4)
    c.arrive_together(
        make_request("first", prompt=10, max_tokens=8),
        make_request("second", prompt=10, max_tokens=8),
    )
    c.run(until=lambda: c.core.stats.num_preemptions > 0)
    c.gateway.streams[RequestId(b"second")].attempt = 6
    c.gateway.streams[RequestId(b"second")].tokens.clear()
    held = {RequestId(b"second"): 6}
    c.join_as(make_worker("w1", snapshot_attempts=held, gateways=(), now_ns=c.now_ns))
    c.run()
    assert (c.output("second"), c.finish("second").attempt) == (
        expected_output(make_request("second", max_tokens=8))[0],
        7,
    )


def test_the_entry_of_what_is_superseded_is_discarded() -> None:
    """Its gateway may know of another one: the answer to what added this one was lost."""
    c = cluster()
    c.begin()
    c.arrive(make_request("a", max_tokens=5, entry_id="unknown to its gateway"))
    ready = c.feed(make_request("a", max_tokens=5, attempt=2))
    assert ready.discards == ("unknown to its gateway",)
