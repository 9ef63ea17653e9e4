"""One end for every request, whoever says it; cancels and later attempts go where they must."""

import asyncio

import pytest

from gateway.core.errors import QueueFullError, RequestRejected, UnavailableError
from gateway.core.labels import cache_partition
from gateway.core.requests import RawRequest
from gateway.core.stream import Fed, StreamState
from gateway.core.types import Admission, FinishReason, QueuedRequest, RequestId, TokenBatch
from gateway.live import RUNS_S
from tests.unit.gateway.fakes import Bench, FakeLink, drain_chunks, make_bench, running

STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR


async def eventually(condition: object, timeout_s: float = 20.0) -> None:
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
    assert bench.fleet.cancelled == bench.queue.cancelled
    assert_idle(bench)


async def test_a_client_that_goes_before_the_first_token() -> None:
    """The scheduler is told through the queue, and all workers: one may compute it already."""
    bench = make_bench()
    live = await bench.submit()
    bench.engine.cancel(live)
    bench.engine.cancel(live)
    assert bench.queue.cancelled == bench.fleet.cancelled == [live.request_id]
    assert (await drain_chunks(bench, live))[1] is FinishReason.CANCELLED
    assert_idle(bench)


async def test_a_client_that_goes_while_its_tokens_do_not_come() -> None:
    """The worker that sent the last may have lost it to another one, and be lost itself."""
    bench = make_bench()
    live = await bench.submit()
    bench.say(live.request_id, "x")
    live.heard_s -= RUNS_S
    bench.engine.cancel(live)
    assert bench.queue.cancelled == bench.fleet.cancelled == [live.request_id]
    assert bench.link.cancelled == []


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
    assert bench.queue.cancelled == bench.fleet.cancelled == []
    bench.link.connected = False
    assert bench.engine.cancel_by_id(second.public_id)
    assert bench.queue.cancelled == bench.fleet.cancelled == [second.request_id]
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


async def test_a_client_that_leaves_while_its_request_is_asked_for_anew_cancels_that() -> None:
    """A cancel that was sent before the later attempt stands in the queue would be for the old."""
    bench = make_bench()
    async with running(bench):
        live = await bench.submit(max_tokens=9)
        bench.say(live.request_id, "ab")
        waits, goes_on = asyncio.Event(), asyncio.Event()
        supersede = bench.queue.supersede

        async def slowly(old: Admission, request: QueuedRequest) -> Admission:
            waits.set()
            await goes_on.wait()
            return await supersede(old, request)

        bench.queue.supersede = slowly  # type: ignore[method-assign]
        bench.engine.on_gap(bench.link)
        await waits.wait()
        bench.engine.cancel(live)
        before = len(bench.queue.cancelled)
        goes_on.set()
        await eventually(lambda: bench.queue.superseded)
        await eventually(lambda: len(bench.queue.cancelled) > before)
        assert bench.queue.cancelled[-1] == live.request_id
    assert_idle(bench)


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


@pytest.mark.parametrize("attempt", [2**31 - 1, 2**32 - 1])
async def test_a_worker_that_names_the_last_attempt_ends_that_request_only(attempt: int) -> None:
    """No later one can be asked for, whose entry nobody could write or read."""
    bench = make_bench()
    async with running(bench):
        live, other = await bench.submit(max_tokens=9), await bench.submit(max_tokens=9)
        bench.say(live.request_id, "z", at=5, attempt=attempt)
        bench.say(other.request_id, "z", at=5)
        assert await drain_chunks(bench, live) == ("", ERROR, "stream_lost")
        await eventually(lambda: bench.queue.superseded)
        assert [request.request_id for _, request in bench.queue.superseded] == [other.request_id]


async def test_lost_batches_of_a_worker() -> None:
    """What it ran is superseded; others are left alone, and so is what only waits."""
    bench = make_bench()
    async with running(bench):
        mine, waiting, others = [await bench.submit() for _ in range(3)]
        bench.say(mine.request_id, "a")
        bench.say(others.request_id, "a", link=FakeLink())
        bench.engine.on_gap(bench.link)
        await eventually(lambda: len(bench.queue.asked) > 2)
        assert [request.request_id for _, request in bench.queue.superseded] == [mine.request_id]
        assert (waiting.state.attempt, others.state.attempt) == (1, 1)


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
    assert live.state.end is not None
    assert live.state.end.message == "Too long."
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
    async with asyncio.timeout(20):
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


async def test_what_goes_into_the_queue_beside_the_prompt() -> None:
    """A digest for tenant and salt, a trace if it is one, the shorter of two deadlines."""
    bench = make_bench(deadline_s=600)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await bench.submit(tenant="t", cache_salt="s", traceparent=trace, deadline_ms=1500)
    await bench.submit(traceparent="nonsense", deadline_ms=10**12)
    await bench.submit()
    asked, much, nothing = bench.queue.admitted
    assert (asked.cache_salt, asked.traceparent) == (cache_partition("t", "s"), trace)
    assert asked.life_ms == 1500
    assert (much.cache_salt, much.traceparent, much.life_ms) == (b"", "", 600_000)
    assert nothing.life_ms == 600_000


async def test_a_deadline_of_the_client_is_kept_here_too() -> None:
    """Should nobody else say so in time."""
    bench = make_bench()
    async with running(bench):
        live = await bench.submit(deadline_ms=1)
        live.backstop_s -= 10
        found = await drain_chunks(bench, live)
    assert found == ("", FinishReason.DEADLINE, "deadline_exceeded")


def prompts(*texts: str, **fields: object) -> list[RawRequest]:
    """Of one request."""
    return [RawRequest(text=text, **fields) for text in texts]  # type: ignore[arg-type]


async def test_several_prompts_are_queued_together() -> None:
    """In one call, in order, each a request of its own."""
    bench = make_bench()
    lives = await bench.engine.submit_all(prompts("a", "bc", "d"))
    assert [len(r.prompt_token_ids) for r in bench.queue.admitted] == [1, 2, 1]
    assert [live.admission and live.admission.entry_id for live in lives] == ["1-1", "1-2", "1-3"]
    assert len({live.request_id for live in lives}) == 3
    assert len({r.sampling.seed for r in bench.queue.admitted}) == 3


@pytest.mark.parametrize("error", [QueueFullError("full", retry_after_s=3), UnavailableError("")])
async def test_several_prompts_are_all_refused(error: Exception) -> None:
    """None is left; where the answer is lost, all of them are cancelled."""
    bench = make_bench()
    bench.queue.error = error
    with pytest.raises(type(error)):
        await bench.engine.submit_all(prompts("a", "b"))
    assert len(bench.queue.cancelled) == (2 if isinstance(error, UnavailableError) else 0)
    assert_idle(bench)


async def test_one_bad_prompt_refuses_all() -> None:
    """Before anything is queued."""
    bench = make_bench()
    with pytest.raises(RequestRejected):
        await bench.engine.submit_all(prompts("a", "x" * 600))
    assert bench.queue.admitted == []
    assert_idle(bench)


async def test_logprobs_come_with_their_tokens() -> None:
    """The prompt's with the first; repeats bring none twice."""
    bench = make_bench()
    live = await bench.submit("abc", echo=True, num_logprobs=1)
    assert bench.queue.admitted[0].sampling.prompt_logprobs
    bench.say(live.request_id, "xy", num_top=1, prompt_len=3)
    chunk = await bench.engine.next_chunk(live)
    assert [e.token_id for e in chunk.logprobs] == list(chunk.token_ids) == [120, 121]
    assert [(e.token_id, e.top) for e in live.prompt_logprobs] == [
        (98, ((112, -0.5),)),
        (99, ((112, -0.5),)),
    ]
    bench.say(live.request_id, "xyz", attempt=2, num_top=1, prompt_len=3, finish=STOP)
    chunk = await bench.engine.next_chunk(live)
    assert [e.token_id for e in chunk.logprobs] == [122]
    assert len(live.prompt_logprobs) == 2
    assert_idle(bench)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_logprobs": 0}, {}),
        ({"num_logprobs": 0, "echo": True}, {"num_top": 0}),
        ({"num_logprobs": 0, "echo": True}, {"num_top": 0, "prompt_len": 2}),
    ],
)
async def test_logprobs_that_a_worker_leaves_out(
    fields: dict[str, object], said: dict[str, int]
) -> None:
    """An answer without them would be half an answer: it ends with a reason."""
    bench = make_bench()
    live = await bench.submit("abc", **fields)
    bench.say(live.request_id, "x", **said)  # type: ignore[arg-type]
    assert await drain_chunks(bench, live) == ("", ERROR, "logprobs_missing")
    assert bench.link.cancelled == [live.request_id]
    assert_idle(bench)


async def test_without_logprobs_no_row_is_looked_at() -> None:
    """Should a worker send some."""
    bench = make_bench()
    live = await bench.submit("abc")
    bench.say(live.request_id, "x", num_top=3, finish=STOP)
    assert (await bench.engine.next_chunk(live)).logprobs == ()
    assert live.state.logprobs == []


async def test_a_prompt_alone() -> None:
    """Echoed, with no output, though one token was computed."""
    bench = make_bench()
    live = await bench.submit("abc", echo=True, max_tokens=0)
    assert (live.echo_text, bench.queue.admitted[0].sampling.max_tokens) == ("abc", 1)
    bench.say(live.request_id, "x", finish=LENGTH)
    chunk = await bench.engine.next_chunk(live)
    assert (chunk.text, chunk.token_ids) == ("", ())
    assert chunk.end is not None
    assert (chunk.end.reason, live.usage.completion_tokens) == (LENGTH, 0)
    assert bench.queue.cancelled == bench.link.cancelled == []


async def test_an_echo_of_tokens_is_their_text() -> None:
    """With or without the special ones, as the output is."""
    bench = make_bench()
    for skip, text in ((True, "a"), (False, "<1>a")):
        raw = RawRequest(token_ids=[1, 97], echo=True, skip_special_tokens=skip)
        assert (await bench.engine.submit(raw)).echo_text == text
    assert (await bench.submit()).echo_text is None


async def test_tokenizing_without_a_request() -> None:
    """A prompt of any length to its tokens, tokens of the vocabulary to their text."""
    bench = make_bench()
    assert await bench.engine.encode(RawRequest(text="é" * 600)) == [233] * 600
    assert await bench.engine.decode([1, 97]) == "<1>a"
    assert await bench.engine.decode([1, 97], skip_special_tokens=True) == "a"
    with pytest.raises(RequestRejected) as caught:
        await bench.engine.decode([0x3000])
    assert caught.value.param == "tokens"
    with pytest.raises(RequestRejected):
        await bench.engine.encode(RawRequest(text="a", model="other"))
    assert_idle(bench)
