"""Owns the flat arrays of one step: all tokens of all rows in one line, and where they belong.

Pure: numpy only. Row r's tokens stand at query_start_loc[r]:query_start_loc[r + 1]; its first one
has position rows[r].start. A token at position p goes into slot
block_table[p // block_size] * block_size + p % block_size. Block tables are padded with block 0,
which is never read past a row's length.

A row whose own data can't be right is left out and reported; the others go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_NOTHING: Int64s = np.zeros(0, dtype=np.int64)


class Row(Protocol):
    """What the batch needs of a scheduled row."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens to compute, at least one."""

    @property
    def start(self) -> int:
        """Position of the first of them."""

    @property
    def block_ids(self) -> Sequence[int]:
        """The whole block table."""

    @property
    def samples(self) -> bool:
        """Whether the last token's logits are wanted."""

    @property
    def scored_token_ids(self) -> Sequence[int]:
        """Tokens whose logprobs are wanted; see ports.ScheduledRow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """What the model and the cache allow."""

    num_blocks: int
    block_size: int
    vocab_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBatch:
    """One step as arrays. Views into the builder's buffers: good until its next build.

    `rows` holds the indices (into the step's rows) of the rows that are in the batch; `failures`
    the others with the reason. `sampling_rows` are the indices of rows that sample, and
    logits_indices the place of their last token in the line. scored_rows are the indices of rows
    with scored tokens, and scored_indices the places in the line before each of those.
    """

    token_ids: Int64s
    positions: Int64s
    slot_mapping: Int64s
    block_tables: Int32s
    seq_lens: Int32s
    query_start_loc: Int32s
    logits_indices: Int64s
    rows: tuple[int, ...]
    sampling_rows: tuple[int, ...]
    scored_rows: tuple[int, ...]
    scored_indices: Int64s
    failures: tuple[tuple[int, str], ...]
    max_query_len: int
    max_seq_len: int


class BatchBuilder:
    """Builds one FlatBatch after the other in buffers that grow to the largest step seen."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._tokens = np.zeros((3, 256), dtype=np.int64)
        self._tables = np.zeros((16, 16), dtype=np.int32)

    def build(self, rows: Sequence[Row]) -> FlatBatch:
        """Overwrites the arrays of the batch built before."""
        kept: list[int] = []
        arrays: list[tuple[Int64s, Int32s]] = []
        scored: list[tuple[int, int]] = []
        failures: list[tuple[int, str]] = []
        for index, row in enumerate(rows):
            token_ids = np.asarray(row.token_ids, dtype=np.int64)
            block_ids = np.asarray(row.block_ids, dtype=np.int32)
            reason = self._fault(row.start, token_ids, block_ids)
            if row.scored_token_ids:
                reason = reason or self._scoring_fault(row)
            if reason is None:
                if row.scored_token_ids:
                    scored.append((index, len(kept)))
                kept.append(index)
                arrays.append((token_ids, block_ids))
            else:
                failures.append((index, reason))
        query_lens = np.array([len(tokens) for tokens, _ in arrays], dtype=np.int64)
        starts = np.array([rows[index].start for index in kept], dtype=np.int64)
        bounds = np.zeros(len(kept) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=bounds[1:])
        flat = self._fill_tokens(arrays, starts, bounds)
        samples = np.array([rows[index].samples for index in kept], dtype=bool)
        seq_lens = starts + query_lens
        return FlatBatch(
            token_ids=flat[0],
            positions=flat[1],
            slot_mapping=flat[2],
            block_tables=self._fill_tables(arrays, seq_lens),
            seq_lens=seq_lens.astype(np.int32),
            query_start_loc=bounds.astype(np.int32),
            logits_indices=(bounds[1:] - 1)[samples],
            rows=tuple(kept),
            sampling_rows=tuple(index for index in kept if rows[index].samples),
            scored_rows=tuple(index for index, _ in scored),
            scored_indices=_scored_indices(rows, scored, bounds) if scored else _NOTHING,
            failures=tuple(failures),
            max_query_len=int(query_lens.max(initial=0)),
            max_seq_len=int(seq_lens.max(initial=0)),
        )

    def _scoring_fault(self, row: Row) -> str | None:
        """Why its tokens can't be scored; None when they can."""
        scored = row.scored_token_ids
        if len(scored) > len(row.token_ids) - row.samples:
            return "more tokens are scored than computed"
        if min(scored) < 0 or max(scored) >= self._limits.vocab_size:
            return f"a scored token is outside the vocabulary of {self._limits.vocab_size}"
        return None

    def _fault(self, start: int, token_ids: Int64s, block_ids: Int32s) -> str | None:
        """Why the row can't be computed; None when it can."""
        limits = self._limits
        end = start + len(token_ids)
        if len(token_ids) == 0:
            return "no tokens to compute"
        if start < 0 or end > limits.max_model_len:
            return f"positions {start}..{end} are outside 0..{limits.max_model_len}"
        if token_ids.min() < 0 or token_ids.max() >= limits.vocab_size:
            return f"a token id is outside the vocabulary of {limits.vocab_size}"
        if end > len(block_ids) * limits.block_size:
            return f"{len(block_ids)} blocks do not cover {end} tokens"
        if block_ids.min() < 0 or block_ids.max() >= limits.num_blocks:
            return f"a block is outside the cache of {limits.num_blocks}"
        return None

    def _fill_tokens(
        self, arrays: list[tuple[Int64s, Int32s]], starts: Int64s, bounds: Int64s
    ) -> npt.NDArray[np.int64]:
        """Token ids, positions and slots, one line each."""
        num_tokens = int(bounds[-1])
        if num_tokens > self._tokens.shape[1]:
            self._tokens = np.zeros((3, 2 * num_tokens), dtype=np.int64)
        flat = self._tokens[:, :num_tokens]
        size = self._limits.block_size
        for (token_ids, block_ids), start, begin in zip(arrays, starts, bounds, strict=False):
            part = flat[:, begin : begin + len(token_ids)]
            positions = np.arange(start, start + len(token_ids), dtype=np.int64)
            part[0] = token_ids
            part[1] = positions
            part[2] = block_ids[positions // size].astype(np.int64) * size + positions % size
        return flat

    def _fill_tables(self, arrays: list[tuple[Int64s, Int32s]], seq_lens: Int64s) -> Int32s:
        """Block tables cut to the blocks in use, padded with block 0."""
        size = self._limits.block_size
        widest = int((-(-seq_lens // size)).max(initial=1))
        num_rows, width = self._tables.shape
        if len(arrays) > num_rows or widest > width:
            shape = (max(2 * len(arrays), num_rows), max(2 * widest, width))
            self._tables = np.zeros(shape, dtype=np.int32)
        tables = self._tables[: len(arrays), :widest]
        for table, (_, block_ids), seq_len in zip(tables, arrays, seq_lens, strict=True):
            used = -(-int(seq_len) // size)
            table[:used] = block_ids[:used]
            table[used:] = 0
        return tables


def _scored_indices(
    rows: Sequence[Row], scored: Sequence[tuple[int, int]], bounds: Int64s
) -> Int64s:
    """Places of the tokens whose logits score the next ones; `scored` has (row, place in batch)."""
    parts = []
    for index, place in scored:
        end = int(bounds[place + 1]) - rows[index].samples
        parts.append(np.arange(end - len(rows[index].scored_token_ids), end, dtype=np.int64))
    return np.concatenate(parts)
