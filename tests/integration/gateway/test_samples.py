"""Several answers to one prompt through the openai SDK: gateway, scheduler and a stub worker.

The worker's tokens come from (seed, sample index, position) alone, so that each choice is known.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest

from benchmarks.stack import Stack
from tests.e2e.models import VOCAB_SIZE, write_stub_model
from tests.e2e.stack import assert_idle, await_workers
from tests.stub_worker.fake_runner import FakeOptions, token_from_seed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
OPTIONS = FakeOptions(vocab_size=VOCAB_SIZE, first_token=300)
PROMPTS = [[300 + i for i in range(40)], [400, 401]]
SEED, NUM_TOKENS = 11, 6


def words(sample_index: int) -> str:
    """What a sample says: tokens from 300 on are words that name themselves."""
    tokens = [token_from_seed(SEED, sample_index, at, OPTIONS) for at in range(NUM_TOKENS)]
    return "".join(f" w{token}" for token in tokens)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One worker."""
    folder = tmp_path_factory.mktemp("samples")
    settings = {
        "QUIRE_DRAIN_S": "1",
        "QUIRE_SERVED_MODEL_NAME": "m",
        "STUB_TOKENS": "seed",
        "STUB_FIRST_TOKEN": str(OPTIONS.first_token),
    }
    with Stack(
        folder / "stack",
        model=str(write_stub_model(Path(folder) / "stub-model")),
        worker_module="tests.stub_worker",
        settings=settings,
    ) as running:
        await_workers(running, 1)
        yield running


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """The SDK; the stack is idle afterwards."""
    async with openai.AsyncOpenAI(base_url=f"{stack.base_url}/v1", api_key="none") as found:
        yield found
    assert_idle(stack)


async def test_completions(client: openai.AsyncOpenAI) -> None:
    """Choices of two prompts, each sample with tokens of its own under one seed."""
    answer = await client.completions.create(
        model="m", prompt=PROMPTS, n=3, best_of=3, seed=SEED, max_tokens=NUM_TOKENS
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [words(i) for i in range(3)] * 2
    assert len({words(i) for i in range(3)}) == 3
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, PROMPTS))
    assert answer.usage.completion_tokens == 6 * NUM_TOKENS


async def test_a_streamed_chat(stack: Stack, client: openai.AsyncOpenAI) -> None:
    """The same choices in pieces, and the samples share their prompt's blocks."""
    before = stack.scheduler.metrics().total("quire:forks_total")
    texts, reasons = [""] * 4, [""] * 4
    usage = None
    stream = await client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": " w300" * 40}],
        n=4,
        seed=SEED,
        max_tokens=NUM_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [words(i) for i in range(4)]
    assert reasons == ["length"] * 4
    assert usage is not None
    assert usage.prompt_tokens > 40
    assert usage.completion_tokens == 4 * NUM_TOKENS
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0
    # The client has the tokens before the scheduler has the steps' results.
    assert_idle(stack)
    assert stack.scheduler.metrics().total("quire:forks_total") - before == 3
