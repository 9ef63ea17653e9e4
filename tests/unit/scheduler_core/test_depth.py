"""Running ahead of a worker, in virtual time: it never waits, and new requests hardly do.

A worker behind a delay each way answers plans one after the other, each `step` long. Results bring
the times that a real worker measures.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from scheduler_svc.core.events import StepCompleted, Tick
from scheduler_svc.core.ready import StepPlan, WorkerView
from tests.builders import Emission, make_core, make_request
from tests.cluster import MS, Cluster

STEP = 20 * MS
NUM_OLD = 3


class TimedCluster(Cluster):
    """A Cluster whose one worker takes time. `delay` is one way, `plan_ns` what planning takes."""

    def __init__(self, *, delay: int, step: int = STEP, plan_ns: int = 0, **config: Any) -> None:
        super().__init__(make_core(**config))
        self.delay, self.step_ns, self.plan_ns = delay, step, plan_ns
        self.jitter: Callable[[], int] = lambda: 0
        self.delay_jitter: Callable[[], int] = lambda: 0
        self.free_at = 0
        self.own_ns = 0
        self.idle_ns: list[int] = []
        self.first_tokens: dict[str, int] = {}
        self.depths: list[int] = []
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._wake_at_ns: int | None = None
        self._received_ns = self._returned_ns = 0
        self.join(num_slots=64, num_blocks=4096, block_size=16, max_model_len=8192)

    def at(self, when: int, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), what))

    def check(self) -> None:
        """Others do: here there are too many rounds."""

    def round(self) -> Any:
        ready = super().round()
        for plan in ready.plans:
            # Streams keep their order, also when the way gets shorter.
            self._received_ns = max(self._received_ns, self.now_ns + self.plan_ns + self.delay)
            self.at(self._received_ns, partial(self._receive, plan))
        if ready.wake_at_ns != self._wake_at_ns:
            self._wake_at_ns = ready.wake_at_ns
            if ready.wake_at_ns is not None:
                self.at(ready.wake_at_ns, partial(self._tick, ready.wake_at_ns))
        return ready

    def _tick(self, wake_at_ns: int) -> None:
        if wake_at_ns == self._wake_at_ns:
            self._wake_at_ns = None
            self.feed(Tick(now_ns=self.now_ns))

    def _receive(self, plan: StepPlan) -> None:
        """The worker has a plan; its outcome is known now and returns when it is due."""
        for _ in range(plan.num_steps):
            self._compute(plan)

    def _compute(self, plan: StepPlan) -> None:
        now = self.now_ns
        begin = max(now, self.free_at)
        begin += self.own_ns
        idle = begin - self.free_at
        duration = max(1, self.step_ns + self.jitter()) if plan.num_rows else 0
        self.free_at = begin + duration
        self.idle_ns.append(idle)
        worker = self.workers[plan.worker_id]
        event = worker.next_result()
        emissions, worker.outbox = worker.outbox, []
        assert isinstance(event, StepCompleted)
        event = replace(
            event,
            step_us=duration // 1000,
            total_us=(self.free_at - now) // 1000,
            idle_us=idle // 1000,
        )
        delay = self.delay + self.delay_jitter()
        self._returned_ns = max(self._returned_ns, self.free_at + delay)
        self.at(self._returned_ns, partial(self._returned, event, emissions))

    def _returned(self, event: StepCompleted, emissions: list[Emission]) -> None:
        for emission in emissions:
            self.gateway.receive(emission)
        self.feed(replace(event, now_ns=self.now_ns))
        for request_id, stream in self.gateway.streams.items():
            if stream.tokens:
                self.first_tokens.setdefault(request_id.decode(), self.now_ns)
        self.depths.append(self.worker.max_steps_in_flight)

    @property
    def worker(self) -> WorkerView:
        return self.core.view().workers[0]

    def run_until(self, end_ns: int) -> None:
        while self._events and self._events[0][0] <= end_ns:
            when, _, what = heapq.heappop(self._events)
            self.now_ns = max(self.now_ns, when)
            what()
        self.now_ns = end_ns


def decoding(*, delay: int, num_steps: int = 200, step: int = STEP, **config: Any) -> TimedCluster:
    """A worker that has decoded for a while and goes on."""
    c = TimedCluster(delay=delay, step=step, **config)
    for number in range(NUM_OLD):
        c.arrive(make_request(f"old{number}", prompt=5, max_tokens=4000))
    c.run_until(num_steps * step)
    return c


def times_to_first_token(c: TimedCluster, count: int = 16) -> list[int]:
    """Of requests that come one after the other, at all phases of the steps."""
    found = []
    for number in range(count):
        c.run_until(c.now_ns + 6 * c.step_ns + number * c.step_ns // count)
        begin, name = c.now_ns, f"new{number}"
        c.arrive(make_request(name, prompt=5, max_tokens=2))
        while name not in c.first_tokens:
            c.run_until(c.now_ns + c.step_ns // 20)
        found.append(c.first_tokens[name] - begin)
    return found


@pytest.mark.parametrize("num_steps", [0, 0.5, 1, 3, 6])
def test_the_worker_never_waits_and_a_new_request_at_most_a_step_more(num_steps: float) -> None:
    """num_steps is the round trip."""
    delay = int(num_steps * STEP / 2)
    slow = times_to_first_token(decoding(delay=delay, max_inflight_steps=1))
    c = decoding(delay=delay)
    begin = len(c.idle_ns)
    ahead = times_to_first_token(c)
    assert not any(c.idle_ns[begin:])
    assert max(ahead) <= min(slow) + 1.1 * STEP, "more than a step later than at best"
    assert sum(ahead) / len(ahead) <= sum(slow) / len(slow) + STEP
    assert c.worker.round_trip_us == pytest.approx(2 * delay / 1000, abs=50)
    assert c.worker.max_steps_in_flight <= 2 + -(-2 * delay // STEP)


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_a_depth_that_is_set_stays(depth: int) -> None:
    c = decoding(delay=3 * STEP, max_inflight_steps=depth)
    assert set(c.depths) == {depth}
    assert c.worker.num_steps_in_flight == depth


def test_planning_counts_like_the_way() -> None:
    c = decoding(delay=MS, plan_ns=STEP, num_steps=400)
    begin = len(c.idle_ns)
    c.run_until(c.now_ns + 100 * STEP)
    assert not any(c.idle_ns[begin:])
    assert c.worker.round_trip_us == pytest.approx((STEP + 2 * MS) / 1000, abs=50)


def test_short_steps_are_not_held_back() -> None:
    """Timers are no finer than a millisecond: what is due so soon goes out at once."""
    c = decoding(delay=MS // 10, step=MS)
    begin = len(c.idle_ns)
    c.run_until(c.now_ns + 100 * MS)
    assert not any(c.idle_ns[begin:])
    assert c.core.take_ready().wake_at_ns is None


@pytest.mark.parametrize("spread", [MS // 2, 5 * MS])
@pytest.mark.parametrize("delay", [0, 9 * MS, 19 * MS // 2])
def test_noise_neither_makes_it_flap_nor_leaves_the_worker_without_work(
    spread: int, delay: int
) -> None:
    """Also where k lies between two values: round trip and lead are just about a step."""
    pick = random.Random(spread + delay)
    c = TimedCluster(delay=delay)
    c.jitter = lambda: pick.randint(-spread, spread)
    c.delay_jitter = lambda: pick.randint(0, MS)
    for number in range(NUM_OLD):
        c.arrive(make_request(f"old{number}", prompt=5, max_tokens=4000))
    c.run_until(400 * STEP)
    begin, turns = len(c.idle_ns), len(c.depths)
    c.run_until(1400 * STEP)
    changes = sum(a != b for a, b in itertools.pairwise(c.depths[turns:]))
    assert changes <= 4
    assert sum(c.idle_ns[begin:]) <= 0.005 * 1000 * STEP


def test_what_a_worker_needs_between_two_steps_is_no_wait_for_a_plan() -> None:
    c = TimedCluster(delay=MS)
    c.own_ns = MS // 10
    for number in range(NUM_OLD):
        c.arrive(make_request(f"old{number}", prompt=5, max_tokens=4000))
    c.run_until(600 * STEP)
    assert set(c.depths[-300:]) == {2}
    assert c.idle_ns[-300:] == [c.own_ns] * 300


def test_it_follows_a_way_that_gets_longer_and_shorter() -> None:
    c = decoding(delay=MS)
    assert c.worker.max_steps_in_flight == 2
    c.delay = 3 * STEP
    c.run_until(c.now_ns + 300 * STEP)
    assert c.worker.max_steps_in_flight == 8
    begin = len(c.idle_ns)
    c.run_until(c.now_ns + 100 * STEP)
    assert not any(c.idle_ns[begin:])
    c.delay = MS
    c.run_until(c.now_ns + 400 * STEP)
    assert c.worker.max_steps_in_flight == 2


def test_a_pause_is_forgotten() -> None:
    """One result that comes a second late says nothing about the next one."""
    c = decoding(delay=MS)
    c.delay_jitter = iter([50 * STEP, *[0] * 10_000]).__next__
    c.run_until(c.now_ns + 70 * STEP)
    assert set(c.depths) == {2}
    assert c.worker.round_trip_us < 2500


def test_an_idle_worker_gets_a_plan_at_once() -> None:
    c = decoding(delay=MS)
    for number in range(NUM_OLD):
        c.cancel(f"old{number}")
    c.run_until(c.now_ns + 20 * STEP)
    begin = c.now_ns
    c.arrive(make_request("a", prompt=5, max_tokens=2))
    c.run_until(c.now_ns + 4 * STEP)
    assert c.first_tokens["a"] - begin == STEP + 2 * MS


def test_without_times_nothing_is_learnt() -> None:
    c = Cluster(make_core())
    c.tells_times = False
    c.begin()
    c.arrive(make_request("a", max_tokens=100))
    c.steps(60)
    view = c.core.view().workers[0]
    assert (view.max_steps_in_flight, view.round_trip_us) == (2, 0)
