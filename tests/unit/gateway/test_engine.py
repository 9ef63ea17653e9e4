"""One end for every request, whoever says it; cancels and later attempts go where they must."""

import asyncio

import pytest

from gateway.core.errors import QueueFullError, UnavailableError
from gateway.core.stream import Fed, StreamState
from gateway.core.types import FinishReason, RequestId, TokenBatch
from tests.unit.gateway.fakes import Bench, FakeLink, drain_chunks, make_bench, running

STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR


async def eventually(condition: object, timeout_s: float = 5.0) -> None:
    """Waits until condition() holds."""
    assert callable(condition)
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (the condition is anything)
            await asyncio.sleep(0.01)


def assert_idle(bench: Bench) -> None:
    """No stream is left."""
    assert bench.engine.num_live == 0
    assert bench.metric("quire:gateway_streams") == 0


async def test_a_request_and_its_answer() -> None:
    """Queued once with all that was asked for; tokens come as text; the worker says the end."""
    bench = make_bench()
    live = await bench.submit("abc", max_tokens=4, seed=5, stop_token_ids=[9])
    [queued] = bench.queue.admitted
    assert (list(queued.prompt_token_ids), queued.attempt) == ([97, 98, 99], 1)
    assert queued.sampling.stop_token_ids == (9, 3)
    assert (queued.sampling.max_tokens, queued.sampling.seed) == (4, 5)
    bench.say(live.request_id, "he", cached=2)
    assert (await bench.engine.next_chunk(live)).text == "he"
    bench.say(live.request_id, "y!", at=2, finish=LENGTH)
    assert await drain_chunks(bench, live) == ("y!", LENGTH, "")
    usage = live.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 4, 2)
    assert bench.queue.cancelled == bench.link.cancelled == []
    assert bench.metric("vllm:request_success_total", finished_reason="length") == 1
    assert bench.metric("vllm:generation_tokens_total") == 4
    assert_idle(bench)


async def test_tokens_may_come_before_the_queue_answers() -> None:
    """The request is known from before it is queued."""
    bench = make_bench()
    task = asyncio.get_running_loop().create_task(bench.submit())
    await asyncio.sleep(0)
    [request_id] = bench.engine._live
    bench.say(request_id, "x", finish=STOP)
    assert await drain_chunks(bench, await task) == ("x", STOP, "")
    assert_idle(bench)


async def test_a_full_queue() -> None:
    """Nothing is left behind, and nothing to cancel."""
    bench = make_bench()
    bench.queue.error = QueueFullError("full", retry_after_s=3)
    with pytest.raises(QueueFullError):
        await bench.submit()
    assert bench.queue.cancelled == []
    assert_idle(bench)


async def test_an_admission_whose_answer_is_lost_is_cancelled() -> None:
    """The script may have run."""
    bench = make_bench()
    bench.queue.error = UnavailableError("away")
    with pytest.raises(UnavailableError):
        await bench.submit()
    assert len(bench.queue.cancelled) == 1
    assert_idle(bench)


async def test_a_client_that_goes_before_the_first_token() -> None:
    """The scheduler is told through the queue."""
    bench = make_bench()
    live = await bench.submit()
    bench.engine.cancel(live)
    bench.engine.cancel(live)
    assert bench.queue.cancelled == [live.request_id]
    assert (await drain_chunks(bench, live))[1] is FinishReason.CANCELLED
    assert_idle(bench)


async def test_a_client_that_goes_later() -> None:
    """The worker that sent the last tokens is told, if its stream is up."""
    bench = make_bench()
    first, second = await bench.submit(), await bench.submit()
    other = FakeLink()
    bench.say(first.request_id, "a")
    bench.say(first.request_id, "ab", attempt=2, link=other)
    bench.say(second.request_id, "a")
    bench.engine.cancel(first)
    assert (bench.link.cancelled, other.cancelled) == ([], [first.request_id])
    bench.link.connected = False
    assert bench.engine.cancel_by_id(second.public_id)
    assert bench.queue.cancelled == [second.request_id]
    assert not bench.engine.cancel_by_id(second.public_id)
    assert not bench.engine.cancel_by_id("no hex")
    assert_idle(bench)


async def test_a_stop_string_ends_the_request_here() -> None:
    """The worker, which does not know of it, is told."""
    bench = make_bench()
    live = await bench.submit(stop=["lo"])
    bench.say(live.request_id, "hel")
    bench.say(live.request_id, "lo wo", at=3)
    assert await drain_chunks(bench, live) == ("hel", STOP, "")
    assert live.usage.completion_tokens == 5
    assert bench.link.cancelled == [live.request_id]
    assert_idle(bench)


async def test_tokens_that_nobody_waits_for() -> None:
    """Cancelled, but not with every batch."""
    bench = make_bench()
    stranger = RequestId(b"s" * 16)
    for i in range(5):
        bench.say(stranger, "x", at=i)
    assert bench.link.cancelled == [stranger]


async def test_a_divergence_is_superseded_with_what_the_client_has() -> None:
    """The old worker's tokens no longer count; the stream goes on under the new attempt."""
    bench = make_bench()
    async with running(bench):
        live = await bench.submit(max_tokens=9)
        bench.say(live.request_id, "abc")
        bench.say(live.request_id, "abX", attempt=2)
        await eventually(lambda: bench.queue.superseded)
        [(old, request)] = bench.queue.superseded
        assert old.entry_id == "1-1"
        assert (request.attempt, "".join(map(chr, request.output_token_ids))) == (3, "abc")
        assert request.request_id == live.request_id
        bench.say(live.request_id, "Y", at=3, attempt=2)
        bench.say(live.request_id, "cd", at=2, attempt=3, finish=STOP)
        assert await drain_chunks(bench, live) == ("abcd", STOP, "")
    assert bench.metric("quire:stream_divergences_total") == 1
    assert bench.metric("quire:superseded_total") == 1
    assert bench.metric("quire:repeated_tokens_total") == 1
    assert_idle(bench)


async def test_superseding_waits_for_redis() -> None:
    """And takes what has come in between."""
    bench = make_bench()
    async with running(bench):
        live = await bench.submit(max_tokens=9)
        bench.say(live.request_id, "ab")
        bench.queue.error = UnavailableError("away")
        bench.engine.on_gap(bench.link)
        await asyncio.sleep(0.1)
        bench.queue.error = None
        await eventually(lambda: bench.queue.superseded)
        assert len(bench.queue.superseded) == 1


async def test_a_stream_that_is_lost_again_and_again() -> None:
    """Ends with an error after three later attempts."""
    bench = make_bench()
    async with running(bench):
        live = await bench.submit(max_tokens=9)
        for attempt in range(1, 5):
            bench.say(live.request_id, "z", at=5, attempt=attempt)
            await eventually(lambda: not live.superseding)
        assert await drain_chunks(bench, live) == ("", ERROR, "stream_lost")
        assert len(bench.queue.superseded) == 3
    assert_idle(bench)


async def test_lost_batches_of_a_worker() -> None:
    """What it ran is superseded, and what may have run there; others are left alone."""
    bench = make_bench()
    async with running(bench):
        mine, unknown, others = [await bench.submit() for _ in range(3)]
        bench.say(mine.request_id, "a")
        bench.say(others.request_id, "a", link=FakeLink())
        bench.engine.on_gap(bench.link)
        await eventually(lambda: len(bench.queue.superseded) == 2)
        ids = {request.request_id for _, request in bench.queue.superseded}
        assert ids == {mine.request_id, unknown.request_id}


async def test_silence_after_the_first_token() -> None:
    """Superseded; before the first token a request may wait."""
    bench = make_bench(stall_s=0.1)
    async with running(bench):
        live, waiting = await bench.submit(), await bench.submit()
        bench.say(live.request_id, "a")
        await eventually(lambda: bench.queue.superseded)
        assert bench.queue.superseded[0][1].request_id == live.request_id
        assert waiting.state.attempt == 1


async def test_a_request_of_which_nothing_is_heard() -> None:
    """Ends here, some time after its deadline."""
    bench = make_bench(deadline_s=-9.9)
    async with running(bench):
        live = await bench.submit()
        found = await drain_chunks(bench, live)
    assert found == ("", FinishReason.DEADLINE, "deadline_exceeded")
    assert bench.queue.cancelled == [live.request_id]


async def test_notices() -> None:
    """End a request with their reason; of an older attempt they say nothing."""
    bench = make_bench()
    live = await bench.submit()
    bench.say(live.request_id, "a", attempt=2)
    bench.notify(live.request_id, FinishReason.DEADLINE, attempt=1)
    assert bench.engine.num_live == 1
    bench.notify(live.request_id, FinishReason.REJECTED, "too long", attempt=2)
    bench.notify(live.request_id, FinishReason.ERROR, attempt=2)
    assert (await drain_chunks(bench, live))[:2] == ("a", FinishReason.REJECTED)
    assert bench.queue.cancelled == bench.link.cancelled == []
    assert_idle(bench)


async def test_a_client_that_reads_too_slowly() -> None:
    """The buffer has a bound; a client that waits for tokens is not slow."""
    bench = make_bench(buffer_tokens=3)
    slow, quick = await bench.submit(), await bench.submit()
    reader = asyncio.get_running_loop().create_task(drain_chunks(bench, quick))
    await asyncio.sleep(0)
    for live in (slow, quick):
        bench.say(live.request_id, "abc")
        bench.say(live.request_id, "defg", at=3)
    bench.say(quick.request_id, "", at=7, finish=STOP)
    text, reason, code = await drain_chunks(bench, slow)
    assert (text, reason, code) == ("abcdefg", ERROR, "slow_reader")
    assert await reader == ("abcdefg", STOP, "")
    assert bench.link.cancelled == [slow.request_id]
    assert_idle(bench)


async def test_one_requests_error_stays_its_own() -> None:
    """An exception while one is fed ends that one; the others of the batch go on."""

    class BrokenState(StreamState):
        def feed(self, *_: object) -> Fed:
            raise KeyError("broken")

    bench = make_bench()
    bad, good = await bench.submit(), await bench.submit()
    bad.state = BrokenState()
    batch = TokenBatch(
        sequence=1,
        request_ids=bad.request_id + good.request_id,
        attempts=[1, 1],
        first_positions=[0, 0],
        num_tokens=[1, 2],
        token_ids=[97, 98, 99],
        finish_reasons=[0, STOP],
        num_cached_tokens=[0, 0],
    )
    bench.engine.on_batch(batch, bench.link)
    assert await drain_chunks(bench, good) == ("bc", STOP, "")
    assert await drain_chunks(bench, bad) == ("", ERROR, "internal_error")
    assert bench.link.cancelled == [bad.request_id]
    assert_idle(bench)


async def test_draining() -> None:
    """No new requests; running ones get the time, then an explicit end."""
    bench = make_bench()
    quick, slow = await bench.submit(), await bench.submit()
    drain = asyncio.get_running_loop().create_task(bench.engine.drain(0.1))
    await asyncio.sleep(0)
    assert not bench.engine.ready
    with pytest.raises(UnavailableError):
        await bench.submit()
    bench.say(quick.request_id, "a", finish=STOP)
    await drain
    assert await drain_chunks(bench, quick) == ("a", STOP, "")
    assert await drain_chunks(bench, slow) == ("", FinishReason.UNAVAILABLE, "draining")
    assert bench.queue.cancelled == [slow.request_id]
    assert_idle(bench)


async def test_ready() -> None:
    """A worker, Redis, and no drain."""
    bench = make_bench()
    assert bench.engine.ready
    bench.fleet.usable = False
    assert not bench.engine.ready
    bench.fleet.usable, bench.queue.available = True, False
    assert not bench.engine.ready
    bench.fleet.max_model_len = 100
    assert bench.engine.max_model_len == 100
