"""A gateway that is behind gives tokens together: when it is; what does not wait or get lost."""

import asyncio
import time
from pathlib import Path

import pytest

from gateway import engine
from gateway.adapters import thread_clock
from gateway.core.saturation import TIMES, Saturation
from gateway.core.types import FinishReason
from gateway.live import LiveRequest
from tests.unit.gateway.fakes import Bench, make_bench


class Clocks:
    """Wall time and a thread's by hand."""

    def __init__(self) -> None:
        self.wall_s = self.wanted_s = 5.0
        self.saturation = Saturation(lambda: self.wall_s, lambda: self.wanted_s)

    def after(self, wall_s: float, wanted_s: float) -> bool:
        """What is said when so much has passed."""
        self.wall_s += wall_s
        self.wanted_s += wanted_s
        return self.saturation.seen()


def test_a_loop_without_rest_for_some_batches_is_behind() -> None:
    clocks = Clocks()
    assert [clocks.after(0.002, 0.0019) for _ in range(TIMES)] == [False] * (TIMES - 1) + [True]
    assert clocks.after(0.002, 0.0019)
    assert not clocks.after(0.020, 0.004)
    assert not clocks.after(0.002, 0.0019)


def test_batches_that_come_rarely_do_not_make_a_loop_busy() -> None:
    clocks = Clocks()
    assert not any(clocks.after(0.050, 0.030) for _ in range(2 * TIMES))


@pytest.mark.parametrize("path", [thread_clock.SCHEDSTAT, "/no/such/file"])
def test_a_threads_clock_goes_with_its_work_and_not_with_its_sleep(path: str) -> None:
    """In seconds: its own time and what it waited for a core, which no sleep adds to."""
    clock = thread_clock.wanted_s(path)
    before, computed = clock(), time.thread_time()
    while time.thread_time() - computed < 0.05:
        sum(range(1000))
    # The wall's time is taken around the clock's: a wait for a core between them counts for it.
    began, after = time.monotonic(), clock()
    assert after - before >= 0.04  # the kernel brings its count up to date at a tick
    time.sleep(0.2)
    assert clock() - after <= time.monotonic() - began - 0.15


def test_waiting_for_a_core_counts(tmp_path: Path) -> None:
    path = tmp_path / "schedstat"
    path.write_text("1500000000 250000000 7\n")
    assert thread_clock.wanted_s(str(path))() == 1.75


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held is not given by the clock."""
    monkeypatch.setattr(engine, "HOLD_S", 3600.0)


async def texts(bench: Bench, live: LiveRequest) -> list[str]:
    """What can be had at once, chunk by chunk."""
    found = []
    try:
        while True:
            async with asyncio.timeout(0.01):
                found.append((await bench.engine.next_chunk(live)).text)
    except TimeoutError:
        return found


@pytest.mark.usefixtures("never")
async def test_held_tokens_go_out_with_the_next_batch_that_is_not_held() -> None:
    bench = make_bench()
    live, other = await bench.submit(), await bench.submit()
    bench.say(live.request_id, "a")
    assert await texts(bench, live) == ["a"]
    bench.say(live.request_id, "b", at=1, hold=True)
    bench.say(live.request_id, "c", at=2, hold=True)
    assert await texts(bench, live) == []
    # Also where that batch speaks of another request.
    bench.say(other.request_id, "x")
    assert await texts(bench, live) == ["bc"]


@pytest.mark.usefixtures("never")
async def test_first_tokens_and_ends_do_not_wait() -> None:
    bench = make_bench()
    live = await bench.submit()
    bench.say(live.request_id, "a", hold=True)
    assert await texts(bench, live) == ["a"]
    bench.say(live.request_id, "b", at=1, hold=True)
    bench.say(live.request_id, "c", at=2, hold=True, finish=FinishReason.LENGTH)
    chunk = await bench.engine.next_chunk(live)
    assert chunk.text == "bc"
    assert chunk.end is not None


async def test_tokens_are_not_held_for_long() -> None:
    bench = make_bench()
    live = await bench.submit()
    bench.say(live.request_id, "a")
    assert await texts(bench, live) == ["a"]
    bench.say(live.request_id, "b", at=1, hold=True)
    async with asyncio.timeout(20):
        assert (await bench.engine.next_chunk(live)).text == "b"


@pytest.mark.usefixtures("never")
async def test_a_reader_that_waits_for_held_tokens_is_not_slow() -> None:
    bench = make_bench(buffer_tokens=4)
    live = await bench.submit()
    bench.say(live.request_id, "a")
    assert await texts(bench, live) == ["a"]
    reading = asyncio.get_running_loop().create_task(bench.engine.next_chunk(live))
    await asyncio.sleep(0)
    bench.say(live.request_id, "bcdefgh", at=1, hold=True)
    assert live.state.end is None
    bench.say(live.request_id, "i", at=8)
    assert (await reading).text == "bcdefghi"


async def test_a_reader_that_is_cancelled_leaves_its_news() -> None:
    """Also where they came just before: the next one to read has them at once."""
    bench = make_bench()
    live = await bench.submit()
    reading = asyncio.get_running_loop().create_task(bench.engine.next_chunk(live))
    await asyncio.sleep(0)
    bench.say(live.request_id, "a")
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()
    async with asyncio.timeout(20):
        assert (await bench.engine.next_chunk(live)).text == "a"
