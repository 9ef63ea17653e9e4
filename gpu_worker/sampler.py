"""Owns the choice of the next token from a row's logits.

Greedy rows take the first of the largest logits. A sampled row takes the kept token i with the
largest

    (logit[i] - largest logit) / temperature + G[i],   G[i] = -log(-log(1 - v[i]))

which draws from the softmax over the kept tokens (Gumbel-max). The noise is counted, not drawn in
order: v[i] = (x + 0.5) / 2**32, where x is word i % 4 of Philox4x32-10 with

    key      seed's low 32 bits, seed's high 32 bits
    counter  i // 4, output position, sample index, 0

so that a token's noise is a function of (seed, token id, output position, sample index) and of
nothing else: not of the batch, the order of rows, the worker, or whether the request was restarted.
What else decides is computed row by row in an order that other rows do not change.

Logits are changed first, in this order: the logit bias is added; stop tokens are forbidden while
fewer than min_tokens are out; logits of tokens in prompt or output are divided by the repetition
penalty (multiplied where negative); those of tokens in the output lose the frequency penalty for
each time they stand there, and the presence penalty once.

Kept are, in this order: the tokens whose probability is at least min_p of the largest one; the
top_k largest logits of those; the fewest of these, largest first, whose probabilities reach top_p
of the kept mass. Equal logits rank by token id. The order is sought among the likely tokens first;
where they do not hold the kept set, among all.

On a CPU with native kernels kernels/native/sample.cpp does all that for the whole step, on a CUDA
device the Triton kernels of kernels/sampler.py; the numpy functions here are what both are held
against, and what chooses without them, and in a step with a row whose settings can't be put into
columns: there each row fails alone. A kernel that fails is no row's fault: that raises.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker import sampling_columns
from gpu_worker.ports import SamplingSpec
from kernels.checks import NATIVE_DTYPES
from kernels.sampling import Sampling

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
TokenIds = npt.NDArray[np.int64]

Row = sampling_columns.Row

NOT_FINITE = "logits are not finite"
GREEDY_BELOW = 1e-5  # a temperature under this is greedy
LIKELY = (1e-3, 1e-5)  # shares of the mass that tokens must have to be looked at first
DENSE_FROM = 2048  # kept tokens from which on noise is made for the whole vocabulary at once

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10


class BadLogitsError(Exception):
    """A row's logits choose nothing: NaN, infinite, or every token is forbidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Token per row (None where it failed) and the reasons by row."""

    token_ids: tuple[int | None, ...]
    failures: tuple[tuple[int, str], ...]


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> Sampled:
    """Next tokens, one for each row. Does not change `logits`."""
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    kernel = _kernel_for(logits) if len(rows) else None
    columns = _columns(rows, logits.shape[1]) if kernel is not None else None
    if kernel is None or columns is None:
        return sample_on_host(logits, rows)
    found = kernel(logits, columns).tolist()
    return Sampled(
        token_ids=tuple(None if token < 0 else token for token in found),
        failures=tuple((at, NOT_FINITE) for at, token in enumerate(found) if token < 0),
    )


def _columns(rows: Sequence[Row], vocabulary: int) -> Sampling | None:
    """What the kernels take; None where a row asks for what can't be."""
    try:
        columns = sampling_columns.columns(rows, vocabulary)
    except Exception:  # of settings alone: no device has been asked for anything
        return None
    return columns if columns.within(vocabulary) else None


def _kernel_for(logits: torch.Tensor) -> Callable[[torch.Tensor, Sampling], torch.Tensor] | None:
    if logits.device.type == "cuda":
        return _device_sample()
    return _native_sample() if logits.dtype in NATIVE_DTYPES else None


@cache
def _device_sample() -> Callable[[torch.Tensor, Sampling], torch.Tensor] | None:
    """The Triton sampler, on the logits' device; None without Triton."""
    try:
        from kernels.sampler import sample as on_device
    except ImportError:
        return None

    return lambda logits, sampling: on_device(logits, sampling.to(logits.device))


@cache
def _native_sample() -> Callable[[torch.Tensor, Sampling], torch.Tensor] | None:
    """The native sampler; None where there are no native kernels."""
    from kernels.native import library, sampling

    return None if library.reason_unavailable() else sampling.sample


def sample_on_host(logits: torch.Tensor, rows: Sequence[Row]) -> Sampled:
    """By torch and numpy."""
    tokens: list[int | None] = [None] * len(rows)
    failures: list[tuple[int, str]] = []
    plain: list[int] = []
    others: list[int] = []
    for index, (spec, position, _) in enumerate(rows):
        changed = spec.shifts_logits or (position < spec.min_tokens and spec.stop_token_ids)
        (others if changed or spec.temperature >= GREEDY_BELOW else plain).append(index)
    for index, token in zip(plain, _greedy(logits, plain), strict=True):
        tokens[index] = token
        if token is None:
            failures.append((index, NOT_FINITE))
    if others:
        part = logits if len(others) == len(rows) else logits[torch.tensor(others)]
        host = part.float().cpu().numpy()
        for index, row in zip(others, host, strict=True):
            try:
                tokens[index] = sample_row(row, *rows[index])
            except Exception as error:  # one row's fault is that row's alone
                failures.append((index, str(error) or type(error).__name__))
    return Sampled(token_ids=tuple(tokens), failures=tuple(sorted(failures)))


def _greedy(logits: torch.Tensor, rows: list[int]) -> list[int | None]:
    """First largest per row; None where that is NaN or infinite. One transfer for all rows."""
    if not rows:
        return []
    part = logits if len(rows) == logits.shape[0] else logits[torch.tensor(rows)]
    best = part.argmax(dim=-1, keepdim=True)  # takes a NaN for the largest
    finite = part.gather(-1, best).isfinite()
    found = torch.where(finite, best, -1).squeeze(-1).tolist()
    return [token if token >= 0 else None for token in found]


def sample_row(
    logits: Floats, spec: SamplingSpec, position: int, history: Sequence[int] | None = None
) -> int:
    """The token of one row. Raises BadLogitsError."""
    if spec.shifts_logits or position < spec.min_tokens:
        logits = logits.copy()
        _change(logits, spec, position, history)
    largest = logits.max()
    if not np.isfinite(largest):
        raise BadLogitsError(NOT_FINITE)
    if spec.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    gaps = logits - largest
    weights = np.exp(gaps / np.float32(spec.temperature))
    kept = _kept(gaps, weights, spec)
    if kept is None or len(kept) >= DENSE_FROM:
        return _choose_dense(gaps, weights, kept, spec, position)
    noise = uniforms(kept, spec.seed, position, spec.sample_index)
    return _choose(gaps, kept, noise, spec.temperature)


def _change(
    logits: Floats, spec: SamplingSpec, position: int, history: Sequence[int] | None
) -> None:
    """Bias, forbidden stop tokens and penalties, in place."""
    if spec.logit_bias:
        tokens, biases = zip(*spec.logit_bias, strict=True)
        logits[list(tokens)] += np.array(biases, dtype=np.float32)
    if position < spec.min_tokens:
        logits[[t for t in spec.stop_token_ids if 0 <= t < len(logits)]] = -np.inf
    if not spec.penalizes:
        return
    assert history is not None, "penalties need the tokens that are there"
    known: TokenIds = np.array(history, dtype=np.int64)
    if spec.repetition_penalty != 1.0:
        penalty = np.float32(spec.repetition_penalty)
        old = logits[known]
        with np.errstate(over="ignore"):  # an infinite logit fails the row
            logits[known] = np.where(old < 0, old * penalty, old / penalty)
    if spec.frequency_penalty or spec.presence_penalty:
        ids, counts = np.unique(known[len(known) - position :], return_counts=True)
        frequency = counts.astype(np.float32) * np.float32(spec.frequency_penalty)
        logits[ids] -= frequency + np.float32(spec.presence_penalty)


def _kept(gaps: Floats, weights: Floats, spec: SamplingSpec) -> TokenIds | None:
    """Ascending ids of the kept tokens; None where all are."""
    top_k = spec.top_k if 0 < spec.top_k < len(gaps) else 0
    probable: TokenIds | None = None
    if spec.min_p > 0.0:
        probable = np.flatnonzero(weights >= np.float32(spec.min_p))
        weights = weights[probable]
    if not top_k and spec.top_p >= 1.0:
        return probable
    total = float(weights.sum(dtype=np.float64))
    ids: TokenIds = np.arange(len(weights))
    for share in LIKELY:
        likely = np.flatnonzero(weights > np.float32(share * total))
        mass = float(weights[likely].sum(dtype=np.float64))
        # With top_k, top_p is a share of what top_k keeps: all of that must be among the likely.
        if len(likely) >= top_k if top_k else mass > spec.top_p * total:
            ids = likely
            break
    if probable is not None:
        ids = probable[ids]
    order = ids[np.argsort(-gaps[ids], kind="stable")]
    if top_k:
        order = order[:top_k]
    if spec.top_p < 1.0:
        exact = np.exp(gaps[order].astype(np.float64) / spec.temperature)
        reached = np.cumsum(exact)
        wanted = spec.top_p * (float(reached[-1]) if top_k else total)
        order = order[: int(np.searchsorted(reached, wanted)) + 1]
    return np.sort(order)


def _choose(gaps: Floats, ids: TokenIds, uniform: Doubles, temperature: float) -> int:
    """The id with the largest perturbed logit, in double precision."""
    scores = gaps[ids].astype(np.float64) / temperature - np.log(-np.log1p(-uniform))
    return int(ids[scores.argmax()])


def _choose_dense(
    gaps: Floats, weights: Floats, kept: TokenIds | None, spec: SamplingSpec, position: int
) -> int:
    """As _choose over many tokens, with logarithms for the few that may win only.

    The winner has the least E / weight with E = -log(1 - v) >= v. So v / weight is a lower bound,
    and who is over the value of the token with the least bound is out; a margin covers fp32.
    """
    vocabulary = len(gaps)
    uniform = all_uniforms(vocabulary, spec.seed, position, spec.sample_index)
    if kept is not None:
        allowed = np.zeros_like(weights)
        allowed[kept] = weights[kept]
        weights = allowed
    with np.errstate(divide="ignore"):
        bounds = uniform / weights
    first = int(bounds.argmin())
    reach = -np.log1p(-uniform[first]) / float(weights[first]) * 1.001
    ids = np.flatnonzero(bounds <= reach)
    return _choose(gaps, ids, uniform[ids], spec.temperature)


def uniforms(ids: TokenIds, seed: int, position: int, sample_index: int) -> Doubles:
    """The v of some tokens, in (0, 1)."""
    words = philox(ids.astype(np.uint64) >> np.uint64(2), seed, position, sample_index)
    return _to_unit(words[ids & 3, np.arange(len(ids))])


def all_uniforms(vocabulary: int, seed: int, position: int, sample_index: int) -> Doubles:
    """The v of every token: each counter's four words serve four of them."""
    words = philox(np.arange((vocabulary + 3) // 4, dtype=np.uint64), seed, position, sample_index)
    return _to_unit(words.T.ravel()[:vocabulary])


def _to_unit(words: npt.NDArray[np.uint64]) -> Doubles:
    return (words.astype(np.float64) + 0.5) * 2.0**-32


def philox(
    first: npt.NDArray[np.uint64], seed: int, second: int, third: int
) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 of counters (first, second, third, 0): four words each, [4, len(first)]."""
    c0 = first.astype(np.uint64)
    c1, c2 = np.full_like(c0, second & 0xFFFFFFFF), np.full_like(c0, third & 0xFFFFFFFF)
    c3 = np.zeros_like(c0)
    low, high = np.empty_like(c0), np.empty_like(c0)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        np.multiply(c0, _M0, out=low)
        np.multiply(c2, _M1, out=high)
        np.right_shift(high, _32, out=c0)
        c0 ^= c1
        c0 ^= np.uint64(k0)
        np.right_shift(low, _32, out=c2)
        c2 ^= c3
        c2 ^= np.uint64(k1)
        np.bitwise_and(high, _LOW, out=c1)
        np.bitwise_and(low, _LOW, out=c3)
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3))
