"""A request that kills workers ends by itself: those that ran beside it finish."""

from typing import Any

import pytest

from scheduler_svc.core.account import Wait
from scheduler_svc.core.events import RequestArrived
from scheduler_svc.core.ready import StepPlan
from scheduler_svc.core.types import FinishReason, PreemptionMode, RequestId, WorkerId
from tests.builders import expected_output, make_core, make_request
from tests.cluster import MS, Cluster

DEPTHS = [1, 2, 4, 8]


class Ward:
    """Workers that die of the first step with a bad request, or fail it, and are there again."""

    def __init__(self, depth: int, *names: str, fails: bool = False, **config: object) -> None:
        self.c = Cluster(make_core(max_inflight_steps=depth, **config))
        self.fails = fails
        self.num_deaths = 0
        for name in names:
            self.c.begin(name)

    def step(self, name: str) -> None:
        """The worker's next plan is computed, or what it does to the worker happens."""
        plan = self.c.workers[WorkerId(name)].plans[0]
        if not any(is_bad(admit.request_id) for admit in plan.admits):
            self.c.step(name)
        elif self.fails:
            self.c.step(name, fail=True)
            if WorkerId(name) not in self.c.workers:  # given up
                self.num_deaths += 1
                self.c.join(name)
        else:
            self.num_deaths += 1
            self.lose(name)

    def lose(self, name: str = "w") -> None:
        """It dies and is there again."""
        self.c.lose(name)
        self.c.join(name)

    def run(self, *, max_steps: int = 2000) -> None:
        """Until nothing is left to do."""
        for count in range(max_steps):
            busy = [worker_id for worker_id, worker in self.c.workers.items() if worker.plans]
            if not busy:
                return
            self.step(busy[count % len(busy)])
        raise AssertionError("it never ends")

    def waits(self, name: str) -> dict[Wait, int]:
        """What a request has waited for so far."""
        found = self.c.core.explain(RequestId(name.encode()))
        assert found is not None
        return dict(found.account.waited)

    def assert_good_end(self, arrivals: list[RequestArrived]) -> None:
        """Of all that are not bad."""
        for arrival in arrivals:
            name = arrival.request_id.decode()
            if is_bad(arrival.request_id):
                assert self.c.end(name) is FinishReason.ERROR
            else:
                assert (self.c.output(name), self.c.end(name)) == expected_output(arrival)


def is_bad(request_id: RequestId) -> bool:
    return request_id.startswith(b"bad")


def requests(*names: str, max_tokens: int = 6) -> list[RequestArrived]:
    return [make_request(name, prompt=5, max_tokens=max_tokens) for name in names]


def admitted(plans: tuple[StepPlan, ...]) -> list[str]:
    return [admit.request_id.decode() for plan in plans for admit in plan.admits]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("names", [("w",), ("w0", "w1"), ("w0", "w1", "w2")])
@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_only_what_kills_ends(depth: int, names: tuple[str, ...], policy: str) -> None:
    """Three workers die of it, as many as it takes to tell."""
    ward = Ward(depth, *names, scheduling_policy=policy)
    arrivals = requests("a", "b", "bad", "c", "d", "e", "f")
    ward.c.arrive_together(*arrivals)
    ward.run()
    ward.assert_good_end(arrivals)
    assert "lost its worker 3 times" in ward.c.finish("bad").message
    assert ward.num_deaths == 3
    ward.c.assert_idle()


@pytest.mark.parametrize("depth", DEPTHS)
def test_each_of_several_is_found(depth: int) -> None:
    ward = Ward(depth, "w0", "w1")
    arrivals = requests("a", "bad0", "b", "bad1", "c", "bad2", "d", "e")
    ward.c.arrive_together(*arrivals)
    ward.run()
    ward.assert_good_end(arrivals)
    assert 3 <= ward.num_deaths <= 9


@pytest.mark.parametrize("depth", DEPTHS)
def test_only_the_request_whose_steps_fail_ends(depth: int) -> None:
    """Its worker lives on, but for what fails too often in a row."""
    ward = Ward(depth, "w", fails=True)
    arrivals = requests("a", "b", "bad", "c", "d", max_tokens=30)
    ward.c.arrive_together(*arrivals)
    ward.run()
    ward.assert_good_end(arrivals)
    assert ward.c.core.stats.num_failed_steps <= 11  # 9, and 2 that cost a worker


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_it_is_found_however_many_come_after_it(policy: str) -> None:
    """What comes all the time does not keep a suspect from being tried, nor end with it."""
    ward = Ward(2, "w", scheduling_policy=policy)
    arrivals = requests("a", "bad", "b")
    ward.c.arrive_together(*arrivals)
    for number in range(60):
        [arrival] = requests(f"r{number}", max_tokens=4)
        arrivals.append(arrival)
        ward.c.arrive(arrival)
        if ward.c.workers[WorkerId("w")].plans:
            ward.step("w")
    assert ward.c.end("bad") is FinishReason.ERROR
    ward.run()
    ward.assert_good_end(arrivals)
    assert ward.num_deaths == 3


def test_after_one_loss_all_go_on_together() -> None:
    """Workers die more often by themselves than by a request."""
    ward = Ward(1, "w")
    ward.c.arrive_together(*requests("a", "b", "c"))
    ward.lose()
    assert admitted(ward.c.last.plans) == ["a", "b", "c"]


def twice_lost(*names: str, depth: int = 1) -> Ward:
    """Requests that have lost their worker twice."""
    ward = Ward(depth, "w")
    ward.c.arrive_together(*requests(*names))
    ward.lose()
    ward.lose()
    return ward


def test_suspects_are_tried_one_after_the_other() -> None:
    """Each until its first token; its time of waiting for that is told."""
    ward = twice_lost("a", "b", "c")
    assert admitted(ward.c.last.plans) == ["a"]
    ward.step("w")
    assert admitted(ward.c.last.plans) == ["b"]
    assert ward.waits("c") == {Wait.SUSPECT: MS}
    ward.step("w")
    assert admitted(ward.c.last.plans) == ["c"]
    assert ward.waits("c") == {Wait.SUSPECT: 2 * MS}
    assert ward.c.workers[WorkerId("w")].plans[0].num_rows == 3
    ward.run()
    ward.assert_good_end(requests("a", "b", "c"))


def test_each_worker_tries_one() -> None:
    ward = twice_lost("a", "b", "c")
    ward.c.join("other")
    assert admitted(ward.c.last.plans) == ["b"]
    ward.run()
    ward.assert_good_end(requests("a", "b", "c"))


def test_what_found_no_room_during_a_trial_is_looked_at_after_it() -> None:
    """The suspect's worker has had room all the time, and no block of it has changed."""
    ward = Ward(1, "w", enable_prefix_caching=False)
    ward.c.arrive_together(*requests("a"))
    ward.lose()
    ward.lose()
    ward.c.join("full", num_blocks=8)
    ward.step("full")
    filler, large = (make_request(name, prompt=24, max_tokens=2) for name in "fl")
    ward.c.arrive_together(filler, large)
    assert admitted(ward.c.last.plans) == ["f"]
    ward.step("w")
    assert admitted(ward.c.last.plans) == ["l"]
    ward.run()
    ward.assert_good_end([*requests("a"), filler, large])


def test_nothing_new_is_admitted_beside_a_suspect() -> None:
    """It would be lost with the worker a first time, and could as well be what kills it."""
    ward = twice_lost("a")
    ward.c.arrive_together(*requests("new"))
    assert admitted(ward.c.last.plans) == []
    ward.step("w")
    assert admitted(ward.c.last.plans) == ["new"]
    ward.run()
    ward.assert_good_end(requests("a", "new"))


def test_a_suspect_waits_for_the_first_token_of_what_is_new_and_nothing_passes_it() -> None:
    c = Cluster(make_core(max_inflight_steps=1))
    c.begin(max_num_batched_tokens=8)
    c.arrive_together(*requests("a"))
    c.lose("w")
    c.join(max_num_batched_tokens=8)
    c.lose("w")
    long = make_request("long", prompt=30, max_tokens=6, priority=-1)
    c.arrive_together(long, *requests("late"))
    c.join(max_num_batched_tokens=8)
    seen = admitted(c.last.plans)
    for _ in range(10):
        c.step()
        for name in admitted(c.last.plans):
            assert c.output(seen[-1]), f"{name} is admitted before {seen[-1]} has a token"
            seen.append(name)
    assert seen == ["long", "a", "late"]
    c.run()
    for arrival in (long, *requests("a", "late")):
        name = arrival.request_id.decode()
        assert (c.output(name), c.end(name)) == expected_output(arrival)


def test_a_token_clears() -> None:
    """The next loss is a first one again."""
    ward = twice_lost("a", "b")
    ward.c.steps(2)
    assert ward.c.output("a")
    assert ward.c.output("b")
    ward.lose()
    assert admitted(ward.c.last.plans) == ["a", "b"]


def test_a_suspect_stays_one_when_its_gateway_asks_anew() -> None:
    ward = twice_lost("a", "b", "c")
    ward.c.supersede("b")
    ward.c.supersede("c")
    assert admitted(ward.c.last.plans) == []
    ward.step("w")
    assert admitted(ward.c.last.plans) == ["b"]
    ward.run()
    ward.assert_good_end(requests("a", "b", "c"))


def test_a_suspect_that_loses_its_blocks_is_not_swapped() -> None:
    """It would come back beside what has been admitted since."""
    c = Cluster(
        make_core(
            max_inflight_steps=1,
            preemption_mode="swap",
            watermark=0.0,
            prefill_chunk_tokens=2,
            enable_prefix_caching=False,
        )
    )
    arrivals = [
        make_request("first", prompt=10, max_tokens=16),
        make_request("suspect", prompt=16, max_tokens=3),
    ]
    room: dict[str, Any] = {"num_blocks": 7, "num_host_blocks": 20}
    c.begin(**room)
    c.arrive_together(*arrivals)
    for _ in range(2):
        c.lose("w")
        c.join(**room)
    c.run(until=lambda: c.core.stats.num_preemptions > 0)
    assert c.output("suspect") == []
    assert c.core.stats.preemptions[PreemptionMode.RECOMPUTE] == 1
    c.run()
    for arrival in arrivals:
        name = arrival.request_id.decode()
        assert (c.output(name), c.end(name)) == expected_output(arrival)
