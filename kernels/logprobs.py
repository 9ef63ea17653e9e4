"""Triton kernel of logprobs: of one token a row, and of the most likely ones beside it.

Torch twin: kernels.reference_sampling.logprobs. A logprob is the natural log softmax in fp32. The
most likely tokens are found one after the other, each by a pass over the row: the greatest logit
after the one before it, equal ones by token id.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check_runs_triton
from kernels.rounding import is_nan
from kernels.sampler import vocabulary_block
from kernels.sampling import check_tokens, num_likeliest
from kernels.tiles import VOCABULARY_WARPS


# fmt: off
@triton.jit
def logprobs_kernel(
    own,  # [R] fp32
    top_ids,  # [R, NUM_TOP] int64
    top_logprobs,  # [R, NUM_TOP] fp32
    logits,  # [R, VOCAB]
    tokens,  # [R] int64
    stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, NUM_TOP: tl.constexpr,
):
    # fmt: on
    """Grid: (R,). NaN where a logit is NaN, or none is finite, or the token is negative."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    largest = tl.full((), float("-inf"), tl.float32)
    num_nan = tl.full((), 0, tl.int32)
    for first in range(0, VOCAB, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        num_nan += tl.sum(is_nan(logit).to(tl.int32), 0)
        largest = tl.maximum(largest, tl.max(tl.where(is_nan(logit), float("-inf"), logit), 0))
    total = tl.full((), 0.0, tl.float32)
    for first in range(0, VOCAB, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        total += tl.sum(tl.exp(logit - largest), 0)
    known = tl.load(tokens + index)
    bad = (num_nan > 0) | (largest == float("-inf")) | (largest == float("inf"))
    total = tl.where(bad, float("nan"), tl.log(total))  # beside the largest: nothing is lost
    mine = tl.load(row + tl.maximum(known, 0)).to(tl.float32) - largest - total
    tl.store(own + index, tl.where(known < 0, float("nan"), mine))

    last = tl.full((), float("inf"), tl.float32)
    last_id = tl.full((), -1, tl.int32)
    for place in range(0, NUM_TOP):
        best = tl.full((), float("-inf"), tl.float32)
        best_id = tl.full((), VOCAB, tl.int32)
        for first in range(0, VOCAB, BLOCK):
            token = first + tl.arange(0, BLOCK)
            logit = tl.load(row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
            after = (logit < last) | ((logit == last) & (token > last_id))
            after = after & (token < VOCAB)
            top = tl.max(tl.where(after, logit, float("-inf")), 0)
            first_id = tl.min(tl.where(after & (logit == top), token, VOCAB), 0)
            if (top > best) | ((best_id == VOCAB) & (first_id < VOCAB)):
                best = top
                best_id = first_id
        last = best
        last_id = best_id
        out = index * NUM_TOP + place
        tl.store(top_ids + out, tl.minimum(best_id, VOCAB - 1).to(tl.int64))
        tl.store(top_logprobs + out, best - largest - total)


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of tokens [R]; and ids and logprobs [R, num_top] of the most likely ones.

    num_top is cut to the vocabulary, see num_likeliest. Does not wait for the device.
    """
    check_tokens(logits, tokens)
    check_runs_triton(logits.device, logprobs_kernel)
    num_top = num_likeliest(logits, num_top)
    num_rows, vocabulary = logits.shape
    device = logits.device
    own = torch.empty(num_rows, dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, num_top), dtype=torch.int64, device=device)
    values = torch.empty((num_rows, num_top), dtype=torch.float32, device=device)
    if num_rows:
        logprobs_kernel[(num_rows,)](
            own,
            ids,
            values,
            logits,
            tokens,
            logits.stride(0),
            VOCAB=vocabulary,
            BLOCK=vocabulary_block(),
            NUM_TOP=num_top,
            num_warps=VOCABULARY_WARPS,
        )
    return own, ids, values
