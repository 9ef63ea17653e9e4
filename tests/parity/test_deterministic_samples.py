"""n samples of one prompt have the bits of n requests that run alone with the same sample index.

Everything but the processes between them is real: core, codecs, replica, runner. Forks and copies
of blocks are asserted by their counters, and tokens and logprobs compared exactly.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from gpu_worker.ports import ModelRunner
from scheduler_svc.core.ready import CoreStats
from tests.kernels.native import needs_native
from tests.parity import families
from tests.parity.comparing import BLOCK_SIZE, runner_of
from tests.parity.whole import Stream, Whole

NUM_SAMPLES = 4
NEW_TOKENS = 20
# Nothing in common, an edge of a block and beside it, and several blocks.
PROMPT_LENS = (1, 2, BLOCK_SIZE, BLOCK_SIZE + 1, BLOCK_SIZE + 2, 41, 100)
SAMPLING: dict[str, Any] = {"temperature": 0.9, "num_logprobs": 2, "max_tokens": NEW_TOKENS}

pytestmark = [needs_native, pytest.mark.timeout(120)]

Makes = Callable[[int], ModelRunner]


@pytest.fixture(scope="session")
def make_runner(tmp_path_factory: pytest.TempPathFactory) -> Makes:
    """By the number of blocks; made once."""
    folder = families.save("llama", tmp_path_factory.mktemp("samples"))

    @cache
    def make(num_blocks: int) -> ModelRunner:
        return runner_of(folder, deterministic=True, num_gpu_blocks_override=num_blocks)

    return make


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(11)
    made = (torch.randint(0, families.VOCABULARY, (n,), generator=generator) for n in PROMPT_LENS)
    return [tuple(prompt.tolist()) for prompt in made]


def add_samples(whole: Whole, number: int, prompt: Sequence[int], start: int = 0) -> None:
    for index in range(start, NUM_SAMPLES):
        group = b"%16d" % number
        whole.add(prompt, sample_index=index, sample_group=group, seed=number, **SAMPLING)


@pytest.fixture(scope="session")
def alone(make_runner: Makes) -> list[Stream]:
    """Each sample as a request without a group, when nothing else runs or is cached."""
    whole = Whole([make_runner(400)], enable_prefix_caching=False)
    for number, prompt in enumerate(prompts()):
        for index in range(NUM_SAMPLES):
            whole.add(prompt, sample_index=index, seed=number, **SAMPLING)
            whole.run()
    assert len({tuple(stream.tokens) for stream in whole.streams}) == len(whole.streams)
    return whole.streams


def same_bits(whole: Whole, alone: Sequence[Stream], order: Sequence[int] | None = None) -> None:
    """Tokens and logprobs."""
    for place, stream in enumerate(whole.streams):
        expected = alone[order[place] if order else place]
        assert stream.ended
        assert len(stream.tokens) == NEW_TOKENS
        assert stream.tokens == expected.tokens
        assert stream.logprobs == expected.logprobs


def served_together(runner: ModelRunner, **config: Any) -> Whole:
    whole = Whole([runner], **config)
    for number, prompt in enumerate(prompts()):
        add_samples(whole, number, prompt)
    whole.run()
    return whole


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("caching", [True, False])
def test_samples_that_come_together(
    depth: int, caching: bool, make_runner: Makes, alone: list[Stream]
) -> None:
    """Those of prompts with a whole block in common are forked."""
    whole = served_together(
        make_runner(400), max_inflight_steps=depth, enable_prefix_caching=caching
    )
    same_bits(whole, alone)
    assert_forked(whole.core.stats, [n for n in PROMPT_LENS if n > BLOCK_SIZE])


@pytest.mark.parametrize("steps", [2, 9])
def test_samples_that_come_when_the_first_has_decoded(
    steps: int, make_runner: Makes, alone: list[Stream]
) -> None:
    """Its block goes on behind the prompt, or has been filled."""
    whole = Whole([make_runner(400)], max_inflight_steps=2)
    order: list[int] = []
    for number, prompt in enumerate(prompts()):
        place = NUM_SAMPLES * number
        whole.add(prompt, sample_group=b"%16d" % number, seed=number, **SAMPLING)
        whole.run(most_steps=steps)
        add_samples(whole, number, prompt, start=1)
        order += range(place, place + NUM_SAMPLES)
    whole.run()
    same_bits(whole, alone, order)
    assert_forked(whole.core.stats, [n for n in PROMPT_LENS if n > 1])


@pytest.mark.parametrize("chunk", [7, 33])
def test_samples_beside_chunks_with_few_blocks(
    chunk: int, make_runner: Makes, alone: list[Stream]
) -> None:
    whole = served_together(make_runner(36), chunk=chunk, watermark=0.0)
    same_bits(whole, alone)
    stats = whole.core.stats
    assert stats.num_preemptions > 0
    assert stats.num_forks > 0
    assert stats.num_chunked_prefills > 0


def assert_forked(stats: CoreStats, prompt_lens: Sequence[int]) -> None:
    """All samples but the first of prompts so long; what ends just behind a block has no copy."""
    num_others = NUM_SAMPLES - 1
    num_inside = sum(n % BLOCK_SIZE != 1 for n in prompt_lens)
    assert stats.num_forks == num_others * len(prompt_lens)
    assert stats.num_copied_blocks == num_others * num_inside
