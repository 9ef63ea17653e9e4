"""Samples of one prompt share its blocks until they write, and give what each would give alone.

Everything but the processes between them is real: core, codecs, replica, runner and its copies.
"""

from collections.abc import Callable

import pytest
import torch

from tests.parity import families
from tests.parity.comparing import BLOCK_SIZE
from tests.parity.conftest import Small
from tests.parity.test_logprobs import Wants, check
from tests.parity.whole import Whole

pytestmark = pytest.mark.timeout(120)

NUM_SAMPLES, NEW_TOKENS = 4, 24
GROUP = b"g" * 16
PROMPT_LEN = 5 * BLOCK_SIZE + 3  # the last block is partly full


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("chunk", [7, 0])
def test_samples_are_those_of_requests_alone(
    chunk: int, depth: int, small: Callable[[str], Small]
) -> None:
    model = small("llama")
    generator = torch.Generator().manual_seed(9)
    prompt = torch.randint(0, families.VOCABULARY, (PROMPT_LEN,), generator=generator).tolist()
    wanted: Wants = {"max_tokens": NEW_TOKENS, "temperature": 0.9, "seed": 3, "num_logprobs": 2}
    whole = Whole(model.runners[:1], chunk=chunk, max_inflight_steps=depth)
    for index in range(NUM_SAMPLES):
        whole.add(prompt, sample_group=GROUP, sample_index=index, **wanted)
    whole.run()
    assert whole.core.stats.num_forks == NUM_SAMPLES - 1
    assert whole.core.stats.num_copied_blocks == NUM_SAMPLES - 1
    check(model.reference, whole.streams, NEW_TOKENS)
    for index, stream in enumerate(whole.streams):
        alone = Whole(model.runners[1:], chunk=chunk)
        alone.add(prompt, sample_index=index, **wanted)
        alone.run()
        assert stream.tokens == alone.streams[0].tokens
    assert len({tuple(stream.tokens) for stream in whole.streams}) == NUM_SAMPLES
