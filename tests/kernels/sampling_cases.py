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
from kernels.sampling import LogitBias, Penalties, RowTokens, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row; history is prompt and output, the last `position` tokens of it the output."""

    spec: SamplingSpec
    position: int = 0
    history: tuple[int, ...] = ()


def ragged(parts: Sequence[Sequence[int]]) -> RowTokens:
    """Lists one after the other."""
    starts = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    return RowTokens(starts=starts, tokens=torch.tensor([t for p in parts for t in p]).long())


def tensors(rows: Sequence[Row], vocabulary: int) -> Sampling:
    """The arguments of the kernels; what no row asks for is None."""
    specs = [row.spec for row in rows]

    def real(name: str) -> Tensor:
        return torch.tensor([getattr(spec, name) for spec in specs], dtype=torch.float64)

    def whole(numbers: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.array(numbers, dtype=np.uint64).view(np.int64))

    forbidden = [
        [t for t in row.spec.stop_token_ids if 0 <= t < vocabulary]
        if row.position < row.spec.min_tokens
        else []
        for row in rows
    ]
    penalties = None
    if any(spec.penalizes for spec in specs):
        history = ragged([row.history if row.spec.penalizes else () for row in rows])
        output = [row.position if row.spec.penalizes else 0 for row in rows]
        penalties = Penalties(
            repetition=real("repetition_penalty"),
            frequency=real("frequency_penalty"),
            presence=real("presence_penalty"),
            history=history,
            output_starts=history.starts[1:] - torch.tensor(output),
        )
    bias = None
    if any(spec.logit_bias for spec in specs):
        bias = LogitBias(
            where=ragged([[token for token, _ in spec.logit_bias] for spec in specs]),
            values=torch.tensor(
                [value for spec in specs for _, value in spec.logit_bias], dtype=torch.float64
            ),
        )
    return Sampling(
        temperature=real("temperature"),
        top_p=real("top_p"),
        min_p=real("min_p"),
        top_k=whole([spec.top_k for spec in specs]),
        seed=whole([spec.seed for spec in specs]),
        position=whole([row.position for row in rows]),
        sample_index=whole([spec.sample_index for spec in specs]),
        bias=bias,
        forbidden=ragged(forbidden) if any(forbidden) else None,
        penalties=penalties,
    )


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
