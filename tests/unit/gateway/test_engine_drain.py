"""A drain and the requests that are on their way into the queue when it begins."""

import asyncio
from collections.abc import Sequence

import pytest

from gateway.core.errors import UnavailableError
from gateway.core.requests import RawRequest
from gateway.core.types import Admission, FinishReason, QueuedRequest
from tests.unit.gateway.fakes import FakeQueue, FakeTokenizer, drain_chunks, make_bench
from tests.unit.gateway.test_engine import STOP, assert_idle


class HeldTokenizer(FakeTokenizer):
    """Goes on when it is let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """As ever, later."""
        await self.let_go.wait()
        return await super().encode_text(text, add_special_tokens=add_special_tokens)


async def test_what_was_let_in_before_a_drain_is_served() -> None:
    """Also while it is tokenized: it has the same time as those that run."""
    tokenizer = HeldTokenizer()
    bench = make_bench(tokenizer=tokenizer)
    loop = asyncio.get_running_loop()
    tokenizer.let_go.set()
    first = await bench.submit()
    tokenizer.let_go.clear()
    submitting = loop.create_task(bench.submit())
    await asyncio.sleep(0)
    drain = loop.create_task(bench.engine.drain(60))
    bench.say(first.request_id, "a", finish=STOP)
    await asyncio.sleep(0.01)
    assert not drain.done()
    tokenizer.let_go.set()
    second = await submitting
    bench.say(second.request_id, "b", finish=STOP)
    assert await drain_chunks(bench, second) == ("b", STOP, "")
    await drain
    assert_idle(bench)


async def test_what_is_queued_after_the_grace_of_a_drain_ends_at_once() -> None:
    """It has an explicit end, and the scheduler is told."""
    tokenizer = HeldTokenizer()
    bench = make_bench(tokenizer=tokenizer)
    submitting = asyncio.get_running_loop().create_task(bench.submit())
    await asyncio.sleep(0)
    await bench.engine.drain(0)
    tokenizer.let_go.set()
    live = await submitting
    assert await drain_chunks(bench, live) == ("", FinishReason.UNAVAILABLE, "draining")
    assert bench.queue.cancelled == [live.request_id]
    assert_idle(bench)


class HeldQueue(FakeQueue):
    """Adds the requests, then raises once it is let go: the script's answer is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = asyncio.Event()

    async def admit(self, requests: Sequence[QueuedRequest]) -> list[Admission]:
        """Adds and raises."""
        await super().admit(requests)
        await self.let_go.wait()
        raise UnavailableError("the answer is lost")


@pytest.mark.parametrize("num_samples", [1, 3])
async def test_an_end_before_a_lost_admission_leaves_nothing(num_samples: int) -> None:
    """What has not ended is cancelled; the error is that of the queue."""
    queue = HeldQueue()
    bench = make_bench(queue=queue)
    submitting = asyncio.get_running_loop().create_task(
        bench.engine.submit_all([RawRequest(text="hello", n=num_samples)])
    )
    queued = [await queue.arrivals.get() for _ in range(num_samples)]
    bench.say(queued[0].request_id, "a", finish=STOP)
    queue.let_go.set()
    with pytest.raises(UnavailableError):
        await submitting
    assert queue.cancelled == [request.request_id for request in queued[1:]]
    assert_idle(bench)
    await bench.engine.drain(60)
