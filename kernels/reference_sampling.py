"""Torch twins of the sampler and the logprobs: plain tensor operations, row by row, in float64.

What is kept is decided by a full sort. The rules are those of gpu_worker.sampler, which chooses on
the host and has the formulas.
"""

import torch
from torch import Tensor

from kernels.sampling import (
    GREEDY_BELOW,
    Penalties,
    RowTokens,
    Sampling,
    check_sampling,
    check_tokens,
)

_LOW = 0xFFFFFFFF


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """Tokens [R] int64; -1 where a row's logits are not finite. Does not change `logits`."""
    check_sampling(logits, sampling)
    chosen = [_sample_row(logits[row].float().clone(), sampling, row) for row in range(len(logits))]
    return torch.tensor(chosen, dtype=torch.int64, device=logits.device)


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of tokens [R]; and ids and logprobs [R, num_top] of the most likely ones."""
    check_tokens(logits, tokens)
    wide = logits.double()
    total = wide.logsumexp(-1, keepdim=True)
    total = torch.where(total.isfinite(), total, torch.nan)
    own = wide.gather(-1, tokens.clamp(min=0)[:, None]) - total
    own = torch.where(tokens[:, None] < 0, torch.nan, own)
    order = wide.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    return own[:, 0].float(), order, (wide.gather(-1, order) - total).float()


def _of_row(part: RowTokens, row: int) -> slice:
    return slice(int(part.starts[row]), int(part.starts[row + 1]))


def _sample_row(logits: Tensor, sampling: Sampling, row: int) -> int:
    if sampling.bias is not None:
        part = _of_row(sampling.bias.where, row)
        logits[sampling.bias.where.tokens[part]] += sampling.bias.values[part].float()
    if sampling.forbidden is not None:
        logits[sampling.forbidden.tokens[_of_row(sampling.forbidden, row)]] = float("-inf")
    if sampling.penalties is not None:
        _penalize(logits, sampling.penalties, row)
    largest = logits.max()
    if not bool(largest.isfinite()):
        return -1
    temperature = float(sampling.temperature[row])
    if temperature < GREEDY_BELOW:
        return int(logits.argmax())
    gaps = (logits - largest).double()
    ids = _kept(gaps, sampling, row)
    noise = uniforms(
        ids,
        int(sampling.seed[row]),
        int(sampling.position[row]),
        int(sampling.sample_index[row]),
    )
    scores = gaps[ids] / temperature - torch.log(-torch.log1p(-noise))
    return int(ids[scores.argmax()])


def _penalize(logits: Tensor, penalties: Penalties, row: int) -> None:
    history = penalties.history.tokens[_of_row(penalties.history, row)]
    repetition = penalties.repetition[row].float()
    if float(repetition) != 1.0:
        old = logits[history]
        logits[history] = torch.where(old < 0, old * repetition, old / repetition)
    begin = int(penalties.output_starts[row] - penalties.history.starts[row])
    ids, counts = history[begin:].unique(return_counts=True)
    logits[ids] -= (
        counts.float() * penalties.frequency[row].float() + penalties.presence[row].float()
    )


def _kept(gaps: Tensor, sampling: Sampling, row: int) -> Tensor:
    """Ascending ids of the kept tokens."""
    temperature, top_k = float(sampling.temperature[row]), int(sampling.top_k[row])
    weights = torch.exp(gaps / temperature)
    ids = (weights >= float(sampling.min_p[row])).nonzero()[:, 0]
    order = ids[gaps[ids].sort(dim=-1, descending=True, stable=True).indices]
    if 0 < top_k < len(gaps):
        order = order[:top_k]
    top_p = float(sampling.top_p[row])
    if top_p < 1.0:
        reached = weights[order].cumsum(0)
        wanted = top_p * reached[-1]
        order = order[: int(torch.searchsorted(reached, wanted)) + 1]
    return order.sort().values


def uniforms(ids: Tensor, seed: int, position: int, sample_index: int) -> Tensor:
    """The noise v of some tokens, in (0, 1): (x + 0.5) / 2**32, x being word id % 4 of Philox."""
    words = _philox(ids // 4, seed, position, sample_index)
    return (words.gather(0, (ids % 4)[None])[0].double() + 0.5) * 2.0**-32


def _philox(c0: Tensor, seed: int, position: int, sample_index: int) -> Tensor:
    """Philox4x32-10 of counters (c0, position, sample_index, 0), four words each [4, n]."""
    c1, c2 = torch.full_like(c0, position & _LOW), torch.full_like(c0, sample_index & _LOW)
    c3 = torch.zeros_like(c0)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        high0, low0 = _product(c0, 0xD2511F53)
        high2, low2 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return torch.stack((c0, c1, c2, c3))


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of a * b, both of 32 bits, within 63."""
    lower, upper = a * (b & 0xFFFF), a * (b >> 16)
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)
