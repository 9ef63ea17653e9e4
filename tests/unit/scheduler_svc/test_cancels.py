"""Of a client's departure the core hears once, though the queue and all workers tell it."""

import asyncio

from scheduler_svc.adapters.cancels import CancelsOnce
from scheduler_svc.core.events import Event, RequestCancelled, Tick
from scheduler_svc.core.types import RequestId
from tests.builders import make_request


class Sink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.full = False

    async def put(self, event: Event) -> None:
        if self.full:
            await asyncio.get_running_loop().create_future()
        self.events.append(event)


def cancel(name: str = "a") -> RequestCancelled:
    return RequestCancelled(now_ns=0, request_id=RequestId(name.encode()))


async def passed(*events: Event, max_remembered: int = 8) -> list[Event]:
    """What comes through of these."""
    sink = Sink()
    once = CancelsOnce(sink, max_remembered)
    for event in events:
        await once.put(event)
    return sink.events


async def test_a_cancel_passes_once() -> None:
    arrivals = make_request("a"), make_request("b")
    repeated = [cancel("a"), cancel("b")] * 16
    assert await passed(*arrivals, *repeated) == [*arrivals, cancel("a"), cancel("b")]


async def test_a_cancel_after_the_arrival_passes_whatever_came_before() -> None:
    """A worker that was told knows it before the queue has been read."""
    arrival = make_request("a")
    early = [cancel(), cancel()]
    assert await passed(*early, arrival, *early) == [cancel(), arrival, cancel()]


async def test_a_request_that_comes_again_can_be_cancelled_again() -> None:
    first, again = make_request("a"), make_request("a", attempt=2)
    events: list[Event] = [first, cancel(), again, cancel()]
    assert await passed(*events) == events


async def test_a_put_that_is_given_up_swallows_nothing() -> None:
    """A session that is cut while the queue is full has told nobody: the next word passes."""
    sink = Sink()
    once = CancelsOnce(sink)
    sink.full = True
    putting = asyncio.get_running_loop().create_task(once.put(cancel()))
    await asyncio.sleep(0)
    putting.cancel()
    await asyncio.wait({putting})
    sink.full = False
    await once.put(cancel())
    assert sink.events == [cancel()]


async def test_all_else_passes() -> None:
    events: list[Event] = [Tick(now_ns=1), Tick(now_ns=1)]
    assert await passed(*events) == events


async def test_few_are_remembered() -> None:
    """An older one may pass twice."""
    names = [cancel(f"r{number}") for number in range(9)]
    assert await passed(*names, names[1], names[0]) == [*names, names[0]]
