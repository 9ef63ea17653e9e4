"""How a step's rows reach the sampling kernels: one column for each setting.

What no row asks for is None and costs the kernels nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpu_worker.ports import SamplingSpec
from kernels.sampling import LogitBias, Penalties, RowTokens, Sampling

# Spec, output position, and prompt and output where tokens that are there already are penalized.
Row = tuple[SamplingSpec, int, Sequence[int] | None]


def columns(rows: Sequence[Row], vocabulary: int) -> Sampling:
    """Of these rows, on the CPU."""
    specs = [spec for spec, _, _ in rows]
    wholes = np.array(
        [[s.top_k, s.seed & (2**64 - 1), p, s.sample_index] for s, p, _ in rows], dtype=np.uint64
    ).reshape(-1, 4)
    reals = np.array([[s.temperature, s.top_p, s.min_p] for s in specs], dtype=np.float64).reshape(
        -1, 3
    )
    top_k, seed, position, sample_index = torch.from_numpy(wholes.T.copy().view(np.int64))
    temperature, top_p, min_p = torch.from_numpy(reals.T.copy())
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        seed=seed,
        position=position,
        sample_index=sample_index,
        bias=_bias(specs),
        forbidden=_forbidden(rows, vocabulary),
        penalties=_penalties(rows),
    )


def _bias(specs: Sequence[SamplingSpec]) -> LogitBias | None:
    if not any(spec.logit_bias for spec in specs):
        return None
    return LogitBias(
        where=_ragged([[token for token, _ in spec.logit_bias] for spec in specs]),
        values=_reals([value for spec in specs for _, value in spec.logit_bias]),
    )


def _forbidden(rows: Sequence[Row], vocabulary: int) -> RowTokens | None:
    """Stop tokens of the rows that are not to end yet."""
    lists = [
        [token for token in spec.stop_token_ids if 0 <= token < vocabulary]
        if position < spec.min_tokens
        else []
        for spec, position, _ in rows
    ]
    return _ragged(lists) if any(lists) else None


def _penalties(rows: Sequence[Row]) -> Penalties | None:
    if not any(spec.penalizes for spec, _, _ in rows):
        return None
    lists: list[Sequence[int]] = []
    outputs = []
    for spec, position, history in rows:
        assert history is not None or not spec.penalizes, "penalties need the tokens there are"
        lists.append(history if history is not None and spec.penalizes else ())
        outputs.append(position if spec.penalizes else 0)
    history_tokens = _ragged(lists)
    return Penalties(
        repetition=_reals([spec.repetition_penalty for spec, _, _ in rows]),
        frequency=_reals([spec.frequency_penalty for spec, _, _ in rows]),
        presence=_reals([spec.presence_penalty for spec, _, _ in rows]),
        history=history_tokens,
        output_starts=history_tokens.starts[1:] - torch.tensor(outputs, dtype=torch.int64),
    )


def _reals(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _ragged(lists: Sequence[Sequence[int]]) -> RowTokens:
    """One after the other."""
    ends = np.cumsum([0, *(len(part) for part in lists)], dtype=np.int64)
    parts = [np.asarray(part, dtype=np.int64) for part in lists]
    return RowTokens(
        starts=torch.from_numpy(ends),
        tokens=torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)),
    )
