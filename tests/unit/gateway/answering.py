"""A worker that answers whatever is asked of a bench, with the logprobs that are asked for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from gateway.core.types import FinishReason, QueuedRequest
from tests.unit.gateway.fakes import Bench


def answer(
    bench: Bench, request: QueuedRequest, text: str, reason: FinishReason = FinishReason.STOP
) -> None:
    """One request's whole output."""
    sampling = request.sampling
    prompt_len = len(request.prompt_token_ids) if sampling.prompt_logprobs else 0
    bench.say(
        request.request_id,
        text,
        finish=reason,
        num_top=sampling.num_logprobs,
        prompt_len=prompt_len,
    )


@contextlib.asynccontextmanager
async def answering(
    bench: Bench, text: str = "k\3", reason: FinishReason = FinishReason.STOP
) -> AsyncIterator[Bench]:
    """Answers until left."""

    async def work() -> None:
        while True:
            answer(bench, await bench.queue.arrivals.get(), text, reason)

    worker = asyncio.get_running_loop().create_task(work())
    try:
        yield bench
    finally:
        worker.cancel()
        await asyncio.wait([worker])
