"""Of what may have gone with a worker only that is asked for again which the queue has lost too."""

import asyncio
from collections.abc import Sequence

import pytest

from gateway import doubts
from gateway.core.errors import UnavailableError
from gateway.core.types import Admission, FinishReason, QueuedRequest
from tests.unit.gateway.fakes import FakeLink, FakeQueue, make_bench, running
from tests.unit.gateway.test_engine import eventually
from tests.virtual_time import in_virtual_time


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts, "LOOK_S", 0.01)


async def test_only_what_the_scheduler_has_no_more_is_asked_for_again() -> None:
    """Whenever it was queued, and however many wait; all are asked for by one command."""
    bench = make_bench()
    async with running(bench):
        lives = [await bench.submit() for _ in range(5)]
        bench.queue.gone = {"1-2", "1-4"}
        bench.engine.on_gap(bench.link)
        await eventually(lambda: len(bench.queue.superseded) == 2)
        await eventually(lambda: len(bench.queue.asked) > 4)
        assert [old.entry_id for old, _ in bench.queue.superseded] == ["1-2", "1-4"]
        assert [live.state.attempt for live in lives] == [1, 2, 1, 2, 1]
        assert sorted(bench.queue.asked[0]) == [f"1-{i}" for i in range(1, 6)]
        assert sorted(bench.queue.asked[-1]) == ["1-1", "1-3", "1-5"]


async def test_an_entry_that_goes_later_is_seen_as_well() -> None:
    """The scheduler had booked the end, but could not write it then."""
    bench = make_bench()
    async with running(bench):
        await bench.submit()
        bench.engine.on_gap(bench.link)
        await eventually(lambda: len(bench.queue.asked) > 2)
        assert bench.queue.superseded == []
        bench.queue.gone = {"1-1"}
        await eventually(lambda: bench.queue.superseded)


@pytest.mark.parametrize("heard", ["a token", "an end", "a notice"])
async def test_what_is_heard_of_is_in_doubt_no_more(heard: str) -> None:
    """Its entry may be gone by then."""
    bench = make_bench()
    async with running(bench):
        live, other = await bench.submit(), await bench.submit()
        bench.engine.on_gap(bench.link)
        await eventually(lambda: bench.queue.asked)
        if heard == "a notice":
            bench.notify(live.request_id, FinishReason.REJECTED)
        else:
            finish = FinishReason.STOP if heard == "an end" else FinishReason.UNSPECIFIED
            bench.say(live.request_id, "x", finish=finish, link=FakeLink())
        bench.queue.gone = {"1-1", "1-2"}
        await eventually(lambda: bench.queue.superseded)
        assert [request.request_id for _, request in bench.queue.superseded] == [other.request_id]
        assert live.state.attempt == 1


@in_virtual_time
async def test_an_end_on_its_way_is_waited_for() -> None:
    """The entry goes before the end is here: once gone is not gone yet."""
    bench = make_bench()
    async with running(bench):
        live = await bench.submit()
        bench.queue.gone = {"1-1"}
        bench.engine.on_gap(bench.link)
        await asyncio.sleep(doubts.LOOK_S / 2)
        assert len(bench.queue.asked) == 1
        bench.say(live.request_id, "x", finish=FinishReason.STOP, link=FakeLink())
        await asyncio.sleep(5 * doubts.LOOK_S)
        assert bench.queue.superseded == []
        assert len(bench.queue.asked) == 1


async def test_nothing_is_taken_for_gone_while_redis_is_away() -> None:
    bench = make_bench()
    async with running(bench):
        live = await bench.submit()
        bench.queue.error = UnavailableError("away")
        bench.engine.on_gap(bench.link)
        await asyncio.sleep(0.05)
        assert live.state.attempt == 1
        bench.queue.error, bench.queue.gone = None, {"1-1"}
        await eventually(lambda: bench.queue.superseded)


async def test_so_many_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its turn."""
    monkeypatch.setattr(doubts, "MAX_ASKED", 2)
    bench = make_bench()
    async with running(bench):
        for _ in range(5):
            await bench.submit()
        bench.queue.gone = {"1-5"}
        bench.engine.on_gap(bench.link)
        await eventually(lambda: bench.queue.superseded)
        assert bench.queue.asked[:3] == [["1-1", "1-2"], ["1-3", "1-4"], ["1-5", "1-1"]]
        assert "1-5" in bench.queue.asked[3]


async def test_long_prompts_are_asked_for_by_fewer_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Redis reads each entry as a whole, and does nothing else meanwhile; one is always read."""
    monkeypatch.setattr(doubts, "MAX_ASKED_TOKENS", 5)
    bench = make_bench()
    async with running(bench):
        for text in ("abc", "de", "f", "longer than all"):
            await bench.submit(text)
        assert [len(r.prompt_token_ids) for r in bench.queue.admitted] == [3, 2, 1, 15]
        bench.engine.on_gap(bench.link)
        await eventually(lambda: len(bench.queue.asked) > 2)
        assert bench.queue.asked[:3] == [["1-1", "1-2"], ["1-3"], ["1-4"]]


class SlowQueue(FakeQueue):
    """Refuses after a while."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.answers = asyncio.Event(), asyncio.Event()

    async def admit(self, requests: Sequence[QueuedRequest]) -> list[Admission]:
        self.reached.set()
        await self.answers.wait()
        raise UnavailableError("away")


async def test_one_whose_admission_fails_is_in_doubt_no_more() -> None:
    """It has no end then, and never will."""
    queue = SlowQueue()
    bench = make_bench(queue=queue)
    async with running(bench):
        admission = asyncio.ensure_future(bench.submit())
        await queue.reached.wait()
        bench.engine.on_gap(bench.link)
        assert len(bench.engine._doubts._gone) == 1
        queue.answers.set()
        with pytest.raises(UnavailableError):
            await admission
        assert not bench.engine._doubts._gone
