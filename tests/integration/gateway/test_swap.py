"""Too few blocks for all clients: gateway, scheduler and a stub worker that swaps beside its steps.

The worker's tokens are made of what its blocks hold, so that a block that was not copied, or copied
too early or to the wrong place, changes what a client reads.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from benchmarks.stack import Stack
from tests.e2e.models import VOCAB_SIZE, write_stub_model
from tests.e2e.stack import assert_idle, await_workers
from tests.stub_worker.fake_runner import FakeOptions, token_from_history

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
OPTIONS = FakeOptions(vocab_size=VOCAB_SIZE, first_token=300)
NUM_CLIENTS, NUM_TOKENS, NUM_PROMPT = 12, 60, 20


def prompt_of(client: int) -> list[int]:
    """The first block is common to three clients each."""
    return [300 + client // 3] * 16 + [310 + client] * (NUM_PROMPT - 16)


def words_of(client: int) -> str:
    """What a client reads: tokens from 300 on are words that name themselves."""
    tokens = prompt_of(client)
    for _ in range(NUM_TOKENS):
        tokens.append(token_from_history(tokens, OPTIONS, seed=client))
    return "".join(f" w{token}" for token in tokens[NUM_PROMPT:])


@pytest.fixture(params=[64, 6], ids=["room in the host", "a small host pool"])
def num_host_blocks(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture
def stack(num_host_blocks: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One worker with 16 blocks, of which 8 clients need 40; a copy takes two steps more."""
    folder = tmp_path_factory.mktemp("swap")
    settings = {
        "QUIRE_DRAIN_S": "1",
        "QUIRE_SERVED_MODEL_NAME": "m",
        "QUIRE_PREEMPTION_MODE": "swap",
        "QUIRE_MAX_NUM_SEQS": "8",
        "QUIRE_NUM_GPU_BLOCKS_OVERRIDE": "16",
        "QUIRE_BLOCK_SIZE": "16",
        "STUB_NUM_HOST_BLOCKS": str(num_host_blocks),
        "STUB_SWAP_STEPS": "2",
        # Slow: no client's answer is whole before the last client has come.
        "STUB_STEP_MS": "20",
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


async def test_every_client_reads_its_own_tokens(stack: Stack, num_host_blocks: int) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.base_url}/v1", api_key="none") as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(
                    model="m", prompt=prompt_of(number), seed=number, max_tokens=NUM_TOKENS
                )
                for number in range(NUM_CLIENTS)
            )
        )
    for number, answer in enumerate(answers):
        assert answer.choices[0].text == words_of(number)
    await asyncio.to_thread(assert_idle, stack)
    metrics = stack.scheduler.metrics()
    assert metrics.total("quire:preemptions_total", mode="swap") >= 3
    assert metrics.total("quire:swap_blocks_total", direction="in") > 0
    if num_host_blocks < 16:
        assert metrics.total("quire:preemptions_total", mode="recompute") >= 1
    assert metrics.total("quire:host_blocks_used") == 0
    assert metrics.total("vllm:num_requests_swapped") == 0
