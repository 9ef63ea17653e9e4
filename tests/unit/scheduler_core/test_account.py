"""Accounts: what a request waited for, and what it lost by preemptions and lost work."""

from scheduler_svc.core.account import MAX_OVERTAKES, Account, Overtakes, Wait, WaitBook
from scheduler_svc.core.explain import EndedRequests
from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.ready import Explanation
from scheduler_svc.core.types import FinishReason, PrefixStop, RequestId
from tests.builders import make_core, make_request
from tests.cluster import MS, Cluster


def cluster(depth: int = 1, **config: object) -> Cluster:
    return Cluster(make_core(max_inflight_steps=depth, **config))


def account(c: Cluster, name: str) -> Account:
    return c.finish(name).account


def waited_ms(c: Cluster, name: str) -> dict[Wait, float]:
    return {wait: duration_ns / MS for wait, duration_ns in account(c, name).waited}


def explained(c: Cluster, name: str) -> Explanation:
    found = c.core.explain(RequestId(name.encode()))
    assert found is not None
    return found


def test_one_that_runs_at_once_has_waited_for_nothing() -> None:
    c = cluster()
    c.begin()
    c.arrive(make_request("a", prompt=2))
    c.run()
    assert account(c, "a") == Account(prefix_stop=PrefixStop.SHORT)


def test_waiting_for_a_slot_is_waiting_for_its_turn() -> None:
    c = cluster()
    c.begin(num_slots=1)
    c.arrive(make_request("first", max_tokens=5))
    c.arrive(make_request("second"))
    c.run()
    assert waited_ms(c, "second") == {Wait.TURN: 5.0}


def test_waiting_for_blocks_is_told_apart_and_passing_is_counted() -> None:
    c = cluster(watermark=0.0)
    c.begin(num_blocks=10, block_size=4)
    c.arrive(make_request("runs", prompt=16, max_tokens=6))
    c.arrive(make_request("large", prompt=36, max_tokens=2))
    c.arrive(make_request("small", prompt=2, max_tokens=2))
    c.run()
    assert waited_ms(c, "large") == {Wait.TURN: 1.0, Wait.BLOCKS: 5.0}
    assert account(c, "large").num_skips == 1


def test_waiting_for_a_worker() -> None:
    c = cluster()
    c.arrive(make_request("a"))
    c.advance(200 * MS)
    c.advance(200 * MS)
    c.begin()
    c.run()
    assert waited_ms(c, "a")[Wait.WORKER] >= 200.0


def test_being_held_back() -> None:
    c = cluster(prefill_chunk_tokens=16)
    c.begin(block_size=4)
    c.arrive_together(*(make_request(n, prompt=64, family=1, max_tokens=1) for n in "ab"))
    c.run()
    assert waited_ms(c, "b") == {Wait.HELD_BACK: 4.0}


def test_with_fair_the_time_after_later_ones_have_gone_first_is_fairness() -> None:
    c = cluster(scheduling_policy="fair")
    c.begin(num_slots=1)
    c.arrive(make_request("g0", max_tokens=4, tenant="greedy"))
    c.arrive(make_request("g1", max_tokens=4, tenant="greedy"))
    c.steps(2)
    c.arrive(make_request("late", max_tokens=3, tenant="modest"))
    c.run()
    assert waited_ms(c, "g1") == {Wait.TURN: 4.0, Wait.FAIRNESS: 3.0}
    assert waited_ms(c, "late") == {Wait.TURN: 2.0}


def test_a_preemption_costs_until_the_next_token() -> None:
    c = cluster(watermark=0.0, enable_prefix_caching=False)
    c.begin(num_blocks=6, block_size=4)
    c.arrive_together(
        make_request("first", prompt=10, max_tokens=8),
        make_request("second", prompt=10, max_tokens=8),
    )
    c.run(until=lambda: c.core.stats.num_preemptions > 0)
    preempted_ns, known = c.now_ns, len(c.output("second"))
    c.run(until=lambda: len(c.output("second")) > known)
    again_ns = c.now_ns
    c.run()
    assert c.finish("second").num_preemptions == 1
    assert account(c, "second").preempted_ns == again_ns - preempted_ns > 0
    assert account(c, "first").preempted_ns == 0


def test_tokens_on_their_way_do_not_end_a_set_back() -> None:
    c = cluster(4, watermark=0.0, enable_prefix_caching=False)
    c.begin(num_blocks=6, block_size=4)
    c.arrive_together(
        make_request("first", prompt=10, max_tokens=8),
        make_request("second", prompt=10, max_tokens=8),
    )
    c.run()
    waits = waited_ms(c, "second")
    assert waits[Wait.RETURNING] > 0
    assert account(c, "second").preempted_ns / MS > sum(waits.values())


def test_a_lost_worker_is_a_set_back_and_a_move() -> None:
    c = cluster()
    c.begin("w")
    c.arrive(make_request("a", max_tokens=9))
    c.steps(3)
    c.lose("w")
    c.advance(50 * MS)
    c.begin("other")
    c.run()
    assert (account(c, "a").num_moves, account(c, "a").preempted_ns) == (1, 0)
    assert 50.0 <= account(c, "a").set_back_ns / MS <= 53.0


def test_one_that_supersedes_keeps_the_account() -> None:
    c = cluster()
    c.begin(num_slots=1)
    c.arrive(make_request("runs", max_tokens=9))
    c.arrive(make_request("a"))
    c.steps(3)
    c.supersede("a")
    c.run()
    assert dict(c.finish("a", 2).account.waited) == {Wait.TURN: 9 * MS}


def test_a_request_can_be_asked_for_at_any_time() -> None:
    c = cluster()
    c.begin(num_slots=1)
    c.arrive(make_request("runs", prompt=4, max_tokens=9))
    c.arrive(make_request("next"))
    c.arrive(make_request("after"))
    c.steps(3)
    runs, after = explained(c, "runs"), explained(c, "after")
    assert (runs.state, runs.worker_id, runs.place) == (RequestState.RUNNING, "w", None)
    assert (runs.num_output_tokens, runs.num_computed_tokens) == (3, 7)
    assert (after.state, after.place) == (RequestState.WAITING, 1)
    assert after.account.waited == ((Wait.TURN, 3 * MS),)
    c.run()
    ended = explained(c, "runs")
    assert (ended.state, ended.finish) == (RequestState.FINISHED, FinishReason.LENGTH)
    assert ended.account == account(c, "runs")


def test_asking_changes_nothing() -> None:
    told: list[list[Account]] = []
    for asks in (False, True):
        c = cluster(2, watermark=0.0, enable_prefix_caching=False)
        c.begin(num_blocks=6, block_size=4)
        c.arrive_together(*(make_request(n, prompt=10, max_tokens=8) for n in "abc"))
        while len(c.finishes) < 3:
            c.step()
            for name in "abc" if asks else ():
                explained(c, name)
        told.append([account(c, name) for name in "abc"])
        assert any(each.preempted_ns for each in told[-1])
    assert told[0] == told[1]


def test_unknown_ones_and_those_forgotten_have_no_account() -> None:
    c = cluster()
    assert c.core.explain(RequestId(b"never")) is None
    c.begin()
    ended = EndedRequests(max_ended=2)
    for name in "abc":
        c.arrive(make_request(name))
        c.run()
        ended.note(c.finish(name))
    assert ended.explain(RequestId(b"a")) is None
    assert ended.explain(RequestId(b"c")) is not None


def test_reasons_follow_each_other_without_gaps() -> None:
    book = WaitBook()
    book.turn_to(Wait.TURN, 10)
    book.turn_to(Wait.TURN, 20)
    book.turn_to(Wait.BLOCKS, 30)
    assert book.until(35) == ((Wait.TURN, 20), (Wait.BLOCKS, 5))
    book.turn_to(None, 50)
    assert book.until(99) == ((Wait.TURN, 20), (Wait.BLOCKS, 20))


def test_only_the_time_after_being_overtaken_is_fairness() -> None:
    book = WaitBook()
    book.turn_to(Wait.TURN, 10)
    book.turn_to(None, 50, overtaken_ns=40)
    assert book.until(60) == ((Wait.TURN, 30), (Wait.FAIRNESS, 10))


def test_overtakes_are_remembered_within_a_bound() -> None:
    overtakes = Overtakes()
    for sequence in range(4 * MAX_OVERTAKES):
        overtakes.note(sequence, 10 * sequence)
        overtakes.note(sequence - 1, 10 * sequence + 5)
    last = 4 * MAX_OVERTAKES - 1
    assert overtakes.since_ns(last) is None
    assert overtakes.since_ns(last - 5) == 10 * (last - 4)
    assert overtakes.since_ns(0) is not None
    assert len(overtakes) <= 2 * MAX_OVERTAKES
