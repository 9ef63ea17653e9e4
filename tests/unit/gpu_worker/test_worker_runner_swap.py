"""Blocks of a real model that are copied on and away and back: nothing that follows may notice.

A model with random weights decodes over two or more blocks; each test disturbs the blocks of one
row and compares tokens and logprobs, bit by bit, with a row that nobody disturbed.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.ports import Operation, OperationKind, SamplingSpec, ScheduledRow
from gpu_worker.runner import TorchRunner
from tests.tiny_llama import BLOCK_SIZE, load_llama, write_llama
from tests.worker_builders import make_operation

pytestmark = pytest.mark.timeout(120)  # the first import of transformers takes its time

# By plain torch.
load = partial(load_llama, attention_backend="torch")
COPY, SWAP_OUT, SWAP_IN = OperationKind.COPY, OperationKind.SWAP_OUT, OperationKind.SWAP_IN
PROMPT = [5, 6, 7, 8, 9, 10]
SAMPLED = {"temperature": 0.9, "seed": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers."""
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def runner(folder: Path) -> TorchRunner:
    """32 blocks of 4 tokens, and 16 in host memory."""
    return load(folder, swap_space_gib=16 * 1024 / 2**30)


class Row:
    """A request as the replica would keep it: known tokens, and what is computed of them."""

    def __init__(self, blocks: list[int], tokens: list[int], **sampling: Any) -> None:
        self.blocks = blocks
        self.tokens = list(tokens)
        self.num_prompt = len(tokens)
        self.computed = 0
        self.spec = SamplingSpec(max_tokens=99, num_logprobs=3, **sampling)
        self.logprobs: list[bytes] = []

    def step(self, runner: TorchRunner) -> None:
        """Computes what is known, and samples."""
        row = ScheduledRow(
            slot=0,
            token_ids=self.tokens[self.computed :],
            start=self.computed,
            block_ids=self.blocks,
            samples=True,
            output_position=len(self.tokens) - self.num_prompt,
            sampling=self.spec,
        )
        output = runner.run([row])
        assert not output.failures
        self.computed = len(self.tokens)
        (token,) = output.token_ids
        assert token is not None
        self.tokens.append(token)
        ((_, scores),) = output.logprobs
        self.logprobs.append(
            b"".join(
                column.tobytes()
                for column in (scores.logprobs, scores.top_token_ids, scores.top_logprobs)
            )
        )


def undisturbed(runner: TorchRunner, num_steps: int, **sampling: Any) -> Row:
    row = Row([20, 21, 22, 23, 24], PROMPT, **sampling)
    for _ in range(num_steps):
        row.step(runner)
    return row


def operate(runner: TorchRunner, *operations: Operation) -> None:
    """All at once, as on a CPU they are."""
    runner.begin_operations(operations)
    done = runner.finished_operations(wait=False)
    assert list(done) == [operation.op_id for operation in operations]


def spoil(runner: TorchRunner, blocks: list[int]) -> None:
    """Another request's keys and values go into these blocks."""
    other = Row(blocks, list(range(30, 30 + BLOCK_SIZE * len(blocks))))
    other.step(runner)


@pytest.mark.parametrize("sampling", [{}, SAMPLED])
def test_a_row_that_was_swapped_out_and_in_goes_on_bit_for_bit(
    runner: TorchRunner, sampling: dict[str, Any]
) -> None:
    expected = undisturbed(runner, 8, **sampling)
    row = Row([3, 9, 4], PROMPT, **sampling)
    for _ in range(4):
        row.step(runner)
    operate(runner, make_operation(1, SWAP_OUT, [(3, 5), (9, 0), (4, 15)]))
    spoil(runner, [3, 9, 4])
    spoil(runner, [11, 31, 2])
    operate(runner, make_operation(2, SWAP_IN, [(5, 31), (0, 2), (15, 11)]))
    row.blocks = [31, 2, 11, 12]
    for _ in range(4):
        row.step(runner)
    assert (row.tokens, row.logprobs) == (expected.tokens, expected.logprobs)


def test_a_swap_into_the_wrong_blocks_would_be_seen(runner: TorchRunner) -> None:
    """What the test above rests on."""
    expected = undisturbed(runner, 5)
    row = Row([3, 9, 4], PROMPT)
    for _ in range(4):
        row.step(runner)
    operate(runner, make_operation(1, SWAP_OUT, [(3, 5), (9, 0), (4, 15)]))
    operate(runner, make_operation(2, SWAP_IN, [(5, 2), (0, 31), (15, 11)]))
    row.blocks = [31, 2, 11]
    row.step(runner)
    assert row.logprobs[:4] == expected.logprobs[:4]
    assert row.logprobs[4] != expected.logprobs[4]


def test_a_shared_block_is_copied_before_it_is_written(runner: TorchRunner) -> None:
    """Two samples of one prompt, whose last block is half full: each goes on as if alone."""
    alone = [undisturbed(runner, 6, **SAMPLED, sample_index=index) for index in (0, 1)]
    first = Row([3, 9, 4], PROMPT, **SAMPLED, sample_index=0)
    second = Row([3, 10, 7], PROMPT, **SAMPLED, sample_index=1)
    first.step(runner)
    second.step(runner)  # computed anew only for its first token; its blocks are then replaced
    spoil(runner, [10])
    operate(runner, make_operation(1, COPY, [(9, 10)]))
    for _ in range(5):
        second.step(runner)
        first.step(runner)
    assert [row.tokens for row in (first, second)] == [row.tokens for row in alone]
    assert [row.logprobs for row in (first, second)] == [row.logprobs for row in alone]
    assert first.tokens != second.tokens


def test_samples_of_a_prompt_differ_only_where_there_is_chance(runner: TorchRunner) -> None:
    """Sample 0 is what a request without an index gets; greedy ones are all alike."""

    def tokens(**sampling: Any) -> list[int]:
        return undisturbed(runner, 6, **sampling).tokens

    sampled = [tuple(tokens(**SAMPLED, sample_index=index)) for index in range(6)]
    assert sampled[0] == tuple(tokens(**SAMPLED))
    assert len(set(sampled)) > 3
    assert tokens(sample_index=5) == tokens()


def test_info_says_how_many_blocks_the_host_holds_and_how_fast_they_move(
    runner: TorchRunner, folder: Path
) -> None:
    info = runner.info
    assert (info.cache_group.block_bytes, info.cache_group.num_host_blocks) == (1024, 16)
    assert info.swap_out_gb_per_s > 0
    assert info.swap_in_gb_per_s > 0
    without = load(folder, swap_space_gib=0).info
    assert without.cache_group.num_host_blocks == 0
    assert (without.swap_out_gb_per_s, without.swap_in_gb_per_s) == (0.0, 0.0)
