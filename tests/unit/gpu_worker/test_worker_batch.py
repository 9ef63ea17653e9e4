"""The flat arrays of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.batch import BatchBuilder, BatchLimits

LIMITS = BatchLimits(num_blocks=50, block_size=4, vocab_size=100, max_model_len=64)


@dataclass
class Row:
    """A row as the batch needs it."""

    token_ids: list[int]
    start: int
    block_ids: list[int]
    samples: bool = True
    scored_token_ids: Sequence[int] = ()


def test_mixed_rows_lie_one_after_the_other() -> None:
    rows = [
        Row([7], 5, [3, 9]),
        Row([1, 2, 3, 4, 5], 2, [8, 2], samples=False),
        Row([6, 7], 0, [11]),
    ]
    batch = BatchBuilder(LIMITS).build(rows)
    assert batch.token_ids.tolist() == [7, 1, 2, 3, 4, 5, 6, 7]
    assert batch.positions.tolist() == [5, 2, 3, 4, 5, 6, 0, 1]
    assert batch.slot_mapping.tolist() == [37, 34, 35, 8, 9, 10, 44, 45]
    assert batch.block_tables.tolist() == [[3, 9], [8, 2], [11, 0]]
    assert batch.seq_lens.tolist() == [6, 7, 2]
    assert batch.query_start_loc.tolist() == [0, 1, 6, 8]
    assert batch.logits_indices.tolist() == [0, 7]
    assert (batch.rows, batch.sampling_rows) == ((0, 1, 2), (0, 2))
    assert (batch.max_query_len, batch.max_seq_len) == (5, 7)
    assert batch.slot_mapping.dtype == np.int64
    assert batch.block_tables.dtype == batch.seq_lens.dtype == np.int32
    assert batch.query_start_loc.dtype == np.int32


def test_scored_tokens_follow_the_last_positions() -> None:
    rows = [
        Row([1, 2, 3, 4], 0, [8], samples=False, scored_token_ids=[3, 4, 5]),
        Row([7], 5, [3, 9]),
        Row([6, 7, 8], 0, [11], scored_token_ids=[7, 8]),
        Row([9, 9], 0, [12], scored_token_ids=[9]),
    ]
    batch = BatchBuilder(LIMITS).build(rows)
    assert batch.scored_rows == (0, 2, 3)
    assert batch.scored_indices.tolist() == [1, 2, 3, 5, 6, 8]
    assert batch.logits_indices.tolist() == [4, 7, 9]
    plain = BatchBuilder(LIMITS).build(rows[1:2])
    assert (plain.scored_rows, len(plain.scored_indices)) == ((), 0)


def test_buffers_are_reused_and_padding_is_block_zero() -> None:
    builder = BatchBuilder(LIMITS)
    first = builder.build([Row([1] * 12, 0, [5, 6, 7]), Row([2] * 12, 0, [8, 9, 10])])
    second = builder.build([Row([3], 0, [4]), Row([4] * 6, 0, [1, 2])])
    assert np.shares_memory(first.token_ids, second.token_ids)
    assert second.block_tables.tolist() == [[4, 0], [1, 2]]
    assert second.token_ids.tolist() == [3, *[4] * 6]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Row([], 0, [1]), "no tokens"),
        (Row([1], 64, list(range(17))), "outside 0..64"),
        (Row([1], -1, [1]), "outside 0..64"),
        (Row([100], 0, [1]), "outside the vocabulary of 100"),
        (Row([-1], 0, [1]), "outside the vocabulary of 100"),
        (Row([1], 4, [1]), "1 blocks do not cover 5 tokens"),
        (Row([1], 0, [50]), "outside the cache of 50"),
        (Row([1, 2], 0, [1], scored_token_ids=[1, 2]), "more tokens are scored than computed"),
        (Row([1, 2], 0, [1], scored_token_ids=[100]), "scored token is outside the vocabulary"),
    ],
)
def test_a_row_that_cannot_be_right_fails_alone(row: Row, reason: str) -> None:
    good = Row([1, 2], 0, [3])
    batch = BatchBuilder(LIMITS).build([good, row, good])
    [(index, message)] = batch.failures
    assert index == 1
    assert reason in message
    assert (batch.rows, batch.sampling_rows) == ((0, 2), (0, 2))
    assert batch.token_ids.tolist() == [1, 2, 1, 2]
    assert batch.logits_indices.tolist() == [1, 3]


def test_nothing_is_left_when_all_rows_fail() -> None:
    batch = BatchBuilder(LIMITS).build([Row([], 0, [])])
    assert batch.rows == ()
    assert len(batch.token_ids) == len(batch.logits_indices) == 0
    assert batch.query_start_loc.tolist() == [0]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 24), st.booleans()), max_size=6))
def test_every_token_lands_where_its_position_says(shapes: list[tuple[int, int, bool]]) -> None:
    blocks = iter(range(50, 0, -1))
    rows = []
    for start, length, samples in shapes:
        end = min(start + length, 64)
        table = [next(blocks, 1) - 1 for _ in range(-(-end // 4))]
        rows.append(Row(list(range(end - start)), start, table, samples))
    batch = BatchBuilder(LIMITS).build(rows)
    assert batch.failures == ()
    for at, row in enumerate(rows):
        span = slice(batch.query_start_loc[at], batch.query_start_loc[at + 1])
        positions = range(row.start, row.start + len(row.token_ids))
        assert batch.token_ids[span].tolist() == row.token_ids
        assert batch.positions[span].tolist() == list(positions)
        assert batch.slot_mapping[span].tolist() == [
            row.block_ids[p // 4] * 4 + p % 4 for p in positions
        ]
        assert batch.block_tables[at, : len(row.block_ids)].tolist() == row.block_ids
