"""The task that owns the core, around a core that records."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from scheduler_svc.core.account import Account
from scheduler_svc.core.events import BecameLeader, Event, GatewayLost, Tick
from scheduler_svc.core.ready import (
    CoreStats,
    CoreView,
    Explanation,
    Finish,
    GivenUp,
    Ready,
    StepPlan,
)
from scheduler_svc.core.types import FinishReason, RequestId, WorkerId
from scheduler_svc.driver import Driver, EventQueue
from scheduler_svc.ports import Completion
from tests.virtual_time import in_virtual_time

S = 1_000_000_000


class FakeClock:
    """The loop's time."""

    def now_ns(self) -> int:
        return round(asyncio.get_running_loop().time() * S)


class FakeCore:
    """Records rounds; `decide` makes the next Ready."""

    def __init__(self) -> None:
        self.stats = CoreStats()
        self.rounds: list[list[Event]] = [[]]
        self.decide: Callable[[list[Event]], Ready] = lambda _: Ready()

    def feed(self, event: Event) -> None:
        if isinstance(event, GatewayLost) and event.gateway_id == "bug":
            raise KeyError("a bug")
        self.rounds[-1].append(event)

    def take_ready(self) -> Ready:
        ready = self.decide(self.rounds[-1])
        self.rounds.append([])
        return ready

    def view(self) -> CoreView:
        return CoreView(epoch=1, num_waiting=0, num_running=0, backlog_tokens=0, workers=())

    def explain(self, request_id: RequestId) -> Explanation | None:
        return None

    @property
    def done(self) -> list[list[Event]]:
        return self.rounds[:-1]


class Outside:
    """Plans, completions and observer in one, recording the order."""

    def __init__(self) -> None:
        self.acts: list[object] = []

    def send(self, plan: StepPlan) -> None:
        self.acts.append(("plan", plan.step))

    def give_up(self, worker_id: WorkerId, reason: str) -> None:
        self.acts.append(("give_up", worker_id, reason))

    def complete(self, completion: Completion) -> None:
        self.acts.append(completion)

    def fed(self, events: Sequence[Event]) -> None:
        self.acts.append(("fed", [type(event).__name__ for event in events]))

    def answered(self, ready: Ready) -> None:
        self.acts.append(("answered", len(ready.plans)))

    def round_done(self, ready: Ready, core_s: float) -> None:
        assert core_s >= 0


class Rig:
    def __init__(self, max_events: int = 4096, *, records: bool = False) -> None:
        self.core, self.outside, self.queue = FakeCore(), Outside(), EventQueue(max_events)
        self.driver = Driver(
            self.core,
            clock=FakeClock(),
            plans=self.outside,
            completions=self.outside,
            observer=self.outside,
            queue=self.queue,
            recorder=self.outside if records else None,
        )
        self.task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        self.task = asyncio.get_running_loop().create_task(self.driver.run(9))
        return self.task


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    if made.task is not None:
        made.task.cancel()
        await asyncio.gather(made.task, return_exceptions=True)


def event(name: str) -> GatewayLost:
    return GatewayLost(now_ns=0, gateway_id=name)


def plan(step: int) -> StepPlan:
    return StepPlan(
        worker_id=WorkerId("w"),
        epoch=9,
        step=step,
        based_on_step=0,
        reset=False,
        releases=(),
        admits=(),
        changed=(),
        growth=(),
        digest=0,
        num_scheduled_tokens=0,
        num_rows=0,
        num_chunks=0,
    )


def finish(entry_id: str, *, notify: bool) -> Finish:
    return Finish(
        request_id=RequestId(b"r" * 16),
        entry_id=entry_id,
        attempt=2,
        gateway_id="g",
        reason=FinishReason.DEADLINE,
        notify=notify,
        message="late",
        num_prompt_tokens=1,
        num_output_tokens=0,
        num_cached_tokens=0,
        num_preemptions=0,
        arrived_ns=0,
        first_scheduled_ns=None,
        first_token_ns=None,
        finished_ns=1,
        account=Account(),
    )


async def test_the_epoch_comes_first(rig: Rig) -> None:
    await rig.queue.put(event("early"))
    rig.start()
    await asyncio.sleep(0.01)
    (first,), second = rig.core.done
    assert isinstance(first, BecameLeader)
    assert first.epoch == 9
    assert second == [event("early")]


async def test_a_round_takes_all_that_is_queued(rig: Rig) -> None:
    rig.start()
    await asyncio.sleep(0.01)
    for name in "abc":
        await rig.queue.put(event(name))
    await asyncio.sleep(0.01)
    assert rig.core.done[1:] == [[event("a"), event("b"), event("c")]]


async def test_ready_is_carried_out_in_its_order(rig: Rig) -> None:
    ready = Ready(
        plans=(plan(1), plan(2)),
        finishes=(finish("1-0", notify=True), finish("2-0", notify=False)),
        discards=("3-0",),
        given_up=(GivenUp(worker_id=WorkerId("x"), reason="it lies"),),
    )
    rig.core.decide = lambda _: ready
    rig.start()
    await asyncio.sleep(0.01)
    plan_1, plan_2, told, silent, dropped, given_up = rig.outside.acts
    assert (plan_1, plan_2) == (("plan", 1), ("plan", 2))
    assert isinstance(told, Completion)
    assert told.notice is not None
    assert (told.entry_ids, told.notice.message) == (("1-0",), "late")
    assert silent == Completion(entry_ids=("2-0",))
    assert dropped == Completion(entry_ids=("3-0",))
    assert given_up == ("give_up", "x", "it lies")


@in_virtual_time
async def test_the_core_gets_a_tick_at_the_time_it_asked_for() -> None:
    rig = Rig()
    wakes = iter([0.05, 0.05, None])

    def decide(_: list[Event]) -> Ready:
        seconds = next(wakes)
        if seconds is None:
            return Ready()
        return Ready(wake_at_ns=FakeClock().now_ns() + round(seconds * S))

    rig.core.decide = decide
    begin = asyncio.get_running_loop().time()
    rig.start()
    while len(rig.core.done) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert asyncio.get_running_loop().time() - begin == pytest.approx(0.1, abs=0.005)
    assert [[type(e) for e in events] for events in rig.core.done[1:]] == [[Tick], [Tick]]
    await asyncio.sleep(0.1)
    assert len(rig.core.done) == 3


@in_virtual_time
async def test_a_wake_up_time_in_the_past_does_not_spin() -> None:
    rig = Rig()
    rig.core.decide = lambda _: Ready(wake_at_ns=1)
    rig.start()
    await asyncio.sleep(0.05)
    assert 2 <= len(rig.core.done) <= 60


async def test_a_due_tick_comes_with_other_events(rig: Rig) -> None:
    rig.core.decide = lambda _: Ready(wake_at_ns=1)
    rig.start()
    await asyncio.sleep(0)
    await rig.queue.put(event("a"))
    await asyncio.sleep(0.01)
    assert [type(e) for e in rig.core.done[1]] == [GatewayLost, Tick]


async def test_writers_wait_while_the_queue_is_full() -> None:
    rig = Rig(max_events=2)
    loop = asyncio.get_running_loop()
    writers = [loop.create_task(rig.queue.put(event(str(i)))) for i in range(5)]
    await asyncio.sleep(0.01)
    assert len(rig.queue) == 2
    assert sum(writer.done() for writer in writers) == 2
    task = rig.start()
    await asyncio.gather(*writers)
    await asyncio.sleep(0.01)
    fed = [e for events in rig.core.done[1:] for e in events]
    assert fed == [event(str(i)) for i in range(5)]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_bug_in_the_core_ends_the_driver(rig: Rig) -> None:
    task = rig.start()
    await rig.queue.put(event("bug"))
    with pytest.raises(KeyError):
        await task


async def test_a_round_is_recorded_before_it_is_fed_and_before_it_is_acted_on() -> None:
    rig = Rig(records=True)
    rig.core.decide = lambda events: Ready(plans=(plan(1),))
    task = rig.start()
    await rig.queue.put(event("bug"))
    with pytest.raises(KeyError):
        await task
    assert rig.outside.acts == [
        ("fed", ["BecameLeader"]),
        ("answered", 1),
        ("plan", 1),
        ("fed", ["GatewayLost"]),
    ]
