"""Rows to sample, as the worker says it and as the kernels are given it; logits of awkward shapes.

Nothing here imports triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.ports import SamplingSpec
from gpu_worker.sampler import BadLogitsError, sample_row
from gpu_worker.sampling_columns import columns
from kernels.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row; history is prompt and output, the last `position` tokens of it the output."""

    spec: SamplingSpec
    position: int = 0
    history: tuple[int, ...] = ()


def tensors(rows: Sequence[Row], vocabulary: int) -> Sampling:
    """The arguments of the kernels; what no row asks for is None."""
    return columns([(row.spec, row.position, row.history) for row in rows], vocabulary)


def on_host(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """What the worker's sampler chooses; -1 for a row that it refuses."""
    chosen = []
    for row_logits, row in zip(logits.float().numpy(), rows, strict=True):
        try:
            chosen.append(sample_row(row_logits, row.spec, row.position, row.history))
        except BadLogitsError:
            chosen.append(-1)
    return chosen


def random_logits(kind: str, num_rows: int, vocabulary: int, seed: int) -> Tensor:
    """plain, tied (few different values), peaked, far (an offset that leaves few bits)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocabulary, generator=generator) * 3
    if kind == "tied":
        return logits.round()
    if kind == "peaked":
        logits[:, :: max(1, vocabulary // 3)] += 30
    if kind == "far":
        logits += 1000
    return logits


def random_rows(num_rows: int, vocabulary: int, seed: int, *, changed: bool) -> list[Row]:
    """Any mix of what can be asked for."""
    random = np.random.default_rng(seed)

    def one_of(*choices: Any) -> Any:
        return choices[int(random.integers(len(choices)))]

    rows = []
    for _ in range(num_rows):
        position = int(random.integers(0, 9))
        history = tuple(int(t) for t in random.integers(0, vocabulary, position + 7))
        more: dict[str, Any] = {}
        if changed:
            stops = random.integers(0, vocabulary + 2, 2)
            biased = random.permutation(vocabulary)[: int(random.integers(0, 4))]
            more = {
                "min_tokens": one_of(0, 5),
                "stop_token_ids": tuple(int(t) for t in stops) if vocabulary > 4 else (),
                "repetition_penalty": one_of(1.0, 1.3),
                "frequency_penalty": one_of(0.0, 0.7),
                "presence_penalty": one_of(0.0, -0.4),
                "logit_bias": tuple((int(t), float(random.normal() * 5)) for t in biased),
            }
        spec = SamplingSpec(
            max_tokens=10,
            temperature=one_of(0.0, 1.0, 0.3, 1.7),
            top_p=one_of(1.0, 1.0, 0.9, 0.5, 0.01),
            top_k=one_of(0, 0, 1, 2, 7, vocabulary, vocabulary + 3, max(1, vocabulary // 2)),
            min_p=one_of(0.0, 0.0, 0.05, 1.0),
            seed=int(random.integers(0, 2**63)) * 2 + 1,
            sample_index=one_of(0, 3),
            **more,
        )
        rows.append(Row(spec=spec, position=position, history=history))
    return rows
