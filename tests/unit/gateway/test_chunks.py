"""The chunks of a call: in the order in which they come, at once where they are written at once."""

import asyncio

import pytest

from gateway.chunks import Chunks
from gateway.core.output import Chunk
from gateway.core.types import FinishReason
from gateway.live import LiveRequest
from tests.unit.gateway.fakes import Bench, make_bench

LENGTH = FinishReason.LENGTH


class Writer:
    """Takes chunks while it is not full."""

    def __init__(self) -> None:
        self.full = False
        self.written: list[tuple[int, str]] = []

    def __call__(self, index: int, chunk: Chunk) -> bool:
        """Refuses ends, and is behind with the last it takes when it is full."""
        if chunk.end is not None:
            return False
        self.written.append((index, chunk.text))
        return not self.full


async def submitted(bench: Bench, count: int) -> list[LiveRequest]:
    return [await bench.submit() for _ in range(count)]


async def waiting(chunks: Chunks, writer: Writer | None) -> "asyncio.Task[tuple[int, Chunk]]":
    task = asyncio.get_running_loop().create_task(chunks.next(writer))
    await asyncio.sleep(0)
    return task


async def test_a_writer_has_tokens_within_the_call_that_brings_them() -> None:
    """Of every request of the call; what it refuses is what `next` gives."""
    bench, writer = make_bench(), Writer()
    first, second = await submitted(bench, 2)
    async with Chunks(bench.engine, [first, second]) as chunks:
        task = await waiting(chunks, writer)
        bench.say(second.request_id, "a")
        bench.say(first.request_id, "b")
        bench.say(second.request_id, "c", at=1)
        assert writer.written == [(1, "a"), (0, "b"), (1, "c")]
        bench.say(second.request_id, "d", at=2, finish=LENGTH)
        index, chunk = await task
        assert (index, chunk.text, chunk.end is not None) == (1, "d", True)
        assert (chunks.num_left, len(writer.written)) == (1, 3)


async def test_what_comes_before_the_wait_is_written_first() -> None:
    """In turn, and without a wait; what comes behind a refusal stays for the next call."""
    bench, writer = make_bench(), Writer()
    lives = await submitted(bench, 3)
    async with Chunks(bench.engine, lives) as chunks:
        bench.say(lives[2].request_id, "x")
        bench.say(lives[0].request_id, "y", finish=LENGTH)
        bench.say(lives[1].request_id, "z")
        index, chunk = await chunks.next(writer)
        assert (index, chunk.text) == (0, "y")
        assert writer.written == [(2, "x")]
        task = await waiting(chunks, writer)
        assert writer.written == [(2, "x"), (1, "z")]
        task.cancel()
        await asyncio.wait([task])


async def test_behind_a_full_writer_tokens_wait_in_their_request() -> None:
    """So they count as unread, and their stream is ended at the bound."""
    bench, writer = make_bench(buffer_tokens=2), Writer()
    [live] = await submitted(bench, 1)
    async with Chunks(bench.engine, [live]) as chunks:
        task = await waiting(chunks, writer)
        bench.say(live.request_id, "a")
        assert live.waiting
        writer.full = True
        bench.say(live.request_id, "b", at=1)
        bench.say(live.request_id, "c", at=2)
        assert (await task)[1].text == "b"
        assert writer.written == [(0, "a"), (0, "b")]
        assert not live.waiting
        bench.say(live.request_id, "de", at=3)
        end = (await chunks.next(writer))[1].end
        assert end is not None
        assert end.code == "slow_reader"


@pytest.mark.parametrize("writes", [False, True])
async def test_a_cancelled_wait_loses_nothing(writes: bool) -> None:
    """Nor does one whose chunk had come just before."""
    bench = make_bench()
    writer = Writer() if writes else None
    [live] = await submitted(bench, 1)
    async with Chunks(bench.engine, [live]) as chunks:
        task = await waiting(chunks, writer)
        bench.say(live.request_id, "a", finish=LENGTH)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        index, chunk = await chunks.next(writer)
        assert (index, chunk.text) == (0, "a")
        assert chunk.end is not None
        assert chunks.num_left == 0


async def test_an_error_of_the_writer_ends_its_request_alone() -> None:
    """The batch goes on, and so do the other requests of the call."""
    bench = make_bench()
    first, second = await submitted(bench, 2)

    def write(index: int, chunk: Chunk) -> bool:
        if index == 0:
            raise KeyError("secret")
        return False

    async with Chunks(bench.engine, [first, second]) as chunks:
        task = asyncio.get_running_loop().create_task(chunks.next(write))
        await asyncio.sleep(0)
        bench.say(first.request_id, "a")
        index, chunk = await task
        assert chunk.end is not None
        assert (index, chunk.text, chunk.end.code) == (0, "", "internal_error")
        bench.say(second.request_id, "b")
        assert (await chunks.next(write))[1].text == "b"
        assert chunks.num_left == 1
    assert bench.link.cancelled == [first.request_id]


async def test_a_stop_string_ends_a_request_within_the_call() -> None:
    """Once, though its end is news as well."""
    bench, writer = make_bench(), Writer()
    live = await bench.submit(stop=["bc"])
    async with Chunks(bench.engine, [live]) as chunks:
        task = await waiting(chunks, writer)
        bench.say(live.request_id, "a")
        bench.say(live.request_id, "bcd", at=1)
        index, chunk = await task
        assert chunk.end is not None
        assert (index, chunk.text, chunk.end.reason) == (0, "", FinishReason.STOP)
        assert (writer.written, chunks.num_left) == ([(0, "a")], 0)
        assert bench.link.cancelled == [live.request_id]


async def test_a_request_has_one_reader() -> None:
    bench = make_bench()
    [live] = await submitted(bench, 1)
    async with Chunks(bench.engine, [live]):
        with pytest.raises(AssertionError):
            await bench.engine.next_chunk(live)
    bench.say(live.request_id, "a")
    assert (await bench.engine.next_chunk(live)).text == "a"
