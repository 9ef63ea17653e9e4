"""Triton kernels of the sampler; kernels.sampler launches them.

sample_kernel chooses one row's token in one program. It never sorts: a token's rank is decided by
its key, the bits of (largest logit - logit), which as an integer grows as the token gets less
likely. The last key that top_k or top_p keeps is found by bisection, each turn one pass over the
row, snapping to keys that are there; of tokens with that very key the first ones by id are kept.

Sums are fp64. Noise and the scores that decide are those of gpu_worker.sampler in fp64, computed
only where an fp32 upper bound says that a token of the turn may win.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from kernels.rounding import is_nan
from kernels.sampling import GREEDY_BELOW as _GREEDY_BELOW

GREEDY_BELOW = tl.constexpr(_GREEDY_BELOW)
NO_KEY = tl.constexpr(0x7FFFFFFF)
LAST_KEY = tl.constexpr(0x7F800000)  # of an infinite gap
IN_PROMPT = tl.constexpr(1 << 30)  # in a token's count: it is in the prompt
UNIT = tl.constexpr(2.0**-32)


@triton.jit
def _running(row, first, largest, temperature, min_p, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Of the tokens first .. first + BLOCK: gap, weight, key, and whether min_p keeps them."""
    token = first + tl.arange(0, BLOCK)
    logit = tl.load(row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    gap = largest - logit
    weight = tl.exp(-tl.div_rn(gap, temperature))
    return gap, weight, gap.to(tl.int32, bitcast=True), (weight >= min_p) & (token < VOCAB)


@triton.jit
def _cut(
    row,
    largest,
    temperature,
    min_p,
    highest,  # the answer is not above this key
    wanted,  # fp64
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    MASS: tl.constexpr,
):
    """The key up to which tokens number, or weigh, at least `wanted`, and the measure below it.

    NO_KEY when all of them do not.
    """
    low = tl.full((), 0, tl.int32)
    high = low + highest
    before = tl.full((), 0.0, tl.float64)
    while low < high:
        middle = low + (high - low) // 2
        measure = tl.full((), 0.0, tl.float64)
        below = tl.full((), 0, tl.int32)  # the greatest key that is there up to middle
        above = tl.full((), NO_KEY, tl.int32)  # the least one after it
        for first in range(0, VOCAB, BLOCK):
            _, weight, key, running = _running(
                row, first, largest, temperature, min_p, VOCAB, BLOCK
            )
            within = running & (key <= middle)
            if MASS:
                measure += tl.sum(tl.where(within, weight, 0.0).to(tl.float64), 0)
            else:
                measure += tl.sum(within.to(tl.int32), 0).to(tl.float64)
            below = tl.maximum(below, tl.max(tl.where(within, key, 0), 0))
            above = tl.minimum(above, tl.min(tl.where(running & (key > middle), key, NO_KEY), 0))
        if measure >= wanted:
            high = below
        else:
            low = above
            before = measure
    return low, before


@triton.jit
def _kept_mass(
    row, largest, temperature, min_p, last, ties, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Weight of the tokens before the key `last`, and of `ties` with it."""
    mass = tl.full((), 0.0, tl.float64)
    for first in range(0, VOCAB, BLOCK):
        _, weight, key, running = _running(row, first, largest, temperature, min_p, VOCAB, BLOCK)
        mass += tl.sum(tl.where(running & (key < last), weight, 0.0).to(tl.float64), 0)
    return mass + ties.to(tl.float64) * _weight_of(last, temperature)


@triton.jit
def _weight_of(key, temperature):
    """fp64 weight of a token with this key."""
    return tl.exp(-tl.div_rn(key.to(tl.float32, bitcast=True), temperature)).to(tl.float64)


@triton.jit
def _noise_words(first, seed, position, sample_index, BLOCK: tl.constexpr):
    """Philox's word for each of the tokens first .. first + BLOCK."""
    counter = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = counter * 0
    w0, w1, w2, w3 = tl.philox(
        seed, counter, zero + position.to(tl.uint32), zero + sample_index.to(tl.uint32), zero
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


# fmt: off
@triton.jit
def sample_kernel(
    tokens,  # [R] int64: the choice, -1 where logits are not finite
    logits,  # [R, VOCAB]
    temperatures, top_ps, min_ps,  # [R] fp64
    top_ks, seeds, positions, sample_indices,  # [R] int64
    stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """Grid: (R,)."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    largest = tl.full((), float("-inf"), tl.float32)
    chosen = tl.full((), 0, tl.int32)
    num_nan = tl.full((), 0, tl.int32)
    for first in range(0, VOCAB, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        num_nan += tl.sum(is_nan(logit).to(tl.int32), 0)
        logit = tl.where(is_nan(logit), float("-inf"), logit)
        top = tl.max(logit, 0)
        if top > largest:
            largest = top
            chosen = tl.min(tl.where(logit == top, token, VOCAB), 0)
    if (num_nan > 0) | (largest == float("-inf")) | (largest == float("inf")):
        tl.store(tokens + index, tl.full((), -1, tl.int64))
        return
    exact = tl.load(temperatures + index)
    if exact < GREEDY_BELOW:
        tl.store(tokens + index, chosen.to(tl.int64))
        return

    temperature = exact.to(tl.float32)
    min_p = tl.load(min_ps + index).to(tl.float32)
    top_k = tl.load(top_ks + index)
    top_p = tl.load(top_ps + index)
    # Kept are the tokens before the key `last`, and the first `ties` of those that have it.
    last = tl.full((), LAST_KEY, tl.int32)
    ties = tl.full((), VOCAB, tl.int32)
    if (top_k > 0) & (top_k < VOCAB):
        cut, before = _cut(
            row, largest, temperature, min_p, LAST_KEY, top_k.to(tl.float64), VOCAB, BLOCK, False
        )
        if cut < LAST_KEY:
            last = cut
            ties = (top_k - before.to(tl.int64)).to(tl.int32)
    if top_p < 1.0:
        wanted = top_p * _kept_mass(row, largest, temperature, min_p, last, ties, VOCAB, BLOCK)
        cut, before = _cut(row, largest, temperature, min_p, last, wanted, VOCAB, BLOCK, True)
        if cut < LAST_KEY:
            needed = (wanted - before) / tl.maximum(_weight_of(cut, temperature), 1e-300)
            needed = tl.minimum(tl.maximum(needed, 1.0), VOCAB + 0.0)
            whole = needed.to(tl.int32)
            whole = whole + (whole.to(tl.float64) < needed).to(tl.int32)
            ties = tl.where(cut == last, tl.minimum(ties, whole), whole)
            last = cut

    seed, position = tl.load(seeds + index), tl.load(positions + index)
    sample_index = tl.load(sample_indices + index)
    best = tl.full((), float("-inf"), tl.float64)
    seen = tl.full((), 0, tl.int32)  # tokens with the key `last` so far
    for first in range(0, VOCAB, BLOCK):
        gap, _, key, running = _running(row, first, largest, temperature, min_p, VOCAB, BLOCK)
        tied = (running & (key == last)).to(tl.int32)
        rank = seen + tl.cumsum(tied, 0)
        kept = running & ((key < last) | ((key == last) & (rank <= ties)))
        seen += tl.sum(tied, 0)
        if tl.max(kept.to(tl.int32), 0) > 0:
            word = _noise_words(first, seed, position, sample_index, BLOCK)
            # -log(-log(1 - v)) <= -log(v); the margin covers fp32.
            cold = tl.div_rn(gap, temperature)
            bound = 0.01 - cold * (1.0 - 1e-5) - tl.log((word.to(tl.float32) + 0.5) * UNIT)
            bound = tl.where(kept, bound, float("-inf"))
            if tl.max(bound, 0).to(tl.float64) > best:
                value = (word.to(tl.float64) + 0.5) * UNIT
                score = -(gap.to(tl.float64) / exact) - tl.log(-tl.log(1.0 - value))
                score = tl.where(kept, score, float("-inf"))
                top = tl.max(score, 0)
                if top > best:
                    best = top
                    token = first + tl.arange(0, BLOCK)
                    chosen = tl.min(tl.where(score == top, token, VOCAB), 0)
    tl.store(tokens + index, chosen.to(tl.int64))


# fmt: off
@triton.jit
def change_tokens_kernel(
    logits,  # [R, vocabulary] fp32, changed in place
    bias_starts, bias_tokens, bias_values,  # or None
    forbidden_starts, forbidden_tokens,  # or None
    stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FORBIDDEN: tl.constexpr,
):
    # fmt: on
    """Adds the biases, then forbids; tokens outside the vocabulary change nothing. Grid: (R,)."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    if HAS_BIAS:
        end = tl.load(bias_starts + index + 1)
        for first in range(tl.load(bias_starts + index), end, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            token = tl.load(bias_tokens + entry, mask=entry < end, other=0)
            value = tl.load(bias_values + entry, mask=entry < end, other=0.0).to(tl.float32)
            inside = (entry < end) & (token >= 0) & (token < VOCAB)
            logit = tl.load(row + token, mask=inside, other=0.0)
            tl.store(row + token, logit + value, mask=inside)
    if HAS_FORBIDDEN:
        tl.debug_barrier()
        end = tl.load(forbidden_starts + index + 1)
        for first in range(tl.load(forbidden_starts + index), end, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            token = tl.load(forbidden_tokens + entry, mask=entry < end, other=0)
            none = tl.full([BLOCK], float("-inf"), tl.float32)
            tl.store(row + token, none, mask=(entry < end) & (token >= 0) & (token < VOCAB))


# fmt: off
@triton.jit
def count_kernel(
    counts,  # [R, vocabulary] int32, zeros: output tokens, and IN_PROMPT
    starts, tokens, output_starts,
    stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """Grid: (R,). Whole numbers: the order of the atomic operations does not matter.

    Tokens outside the vocabulary are not counted.
    """
    index = tl.program_id(0).to(tl.int64)
    row = counts + index * stride
    end = tl.load(starts + index + 1)
    output_start = tl.load(output_starts + index)
    for first in range(tl.load(starts + index), end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        token = tl.load(tokens + entry, mask=entry < end, other=0)
        one = tl.full([BLOCK], 1, tl.int32)
        inside = (entry < end) & (token >= 0) & (token < VOCAB)
        in_output = inside & (entry >= output_start)
        tl.atomic_add(row + token, one, mask=in_output)
        in_prompt = inside & (entry < output_start)
        tl.atomic_or(row + token, one * IN_PROMPT, mask=in_prompt)


# fmt: off
@triton.jit
def penalize_kernel(
    logits,  # [R, VOCAB] fp32, changed in place
    counts,  # as count_kernel leaves them
    repetitions, frequencies, presences,  # [R] fp64
    logits_stride, counts_stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """Grid: (R, blocks of the vocabulary)."""
    index = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetitions + index).to(tl.float32)
    frequency = tl.load(frequencies + index).to(tl.float32)
    presence = tl.load(presences + index).to(tl.float32)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    place = logits + index * logits_stride + token
    count = tl.load(counts + index * counts_stride + token, mask=inside, other=0)
    logit = tl.load(place, mask=inside, other=0.0)
    shrunk = tl.where(logit < 0.0, logit * repetition, tl.div_rn(logit, repetition))
    logit = tl.where(count > 0, shrunk, logit)
    times = count & (IN_PROMPT - 1)
    logit = tl.where(times > 0, logit - (times.to(tl.float32) * frequency + presence), logit)
    tl.store(place, logit, mask=inside)
