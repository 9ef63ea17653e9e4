"""The native sampler, sample.cpp on the columns of kernels.sampling, and logprobs.cpp."""

import torch
from torch import Tensor

from kernels.checks import check_native
from kernels.native import library
from kernels.sampling import Sampling, check_sampling, check_tokens, num_likeliest


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """Tokens [R] int64, -1 where a row's logits choose nothing. Does not change `logits`."""
    check_sampling(logits, sampling)
    check_native(logits)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    call = library.SampleCall(
        tokens=tokens.data_ptr(),
        logits=logits.data_ptr(),
        rows=logits.shape[0],
        vocabulary=logits.shape[1],
        logits_row=logits.stride(0),
        is_bf16=logits.dtype == torch.bfloat16,
    )
    for name in ("temperature", "top_p", "min_p", "top_k", "seed", "position", "sample_index"):
        setattr(call, name, getattr(sampling, name).data_ptr())
    bias, forbidden, penalties = sampling.bias, sampling.forbidden, sampling.penalties
    if bias is not None:
        call.bias_starts = bias.where.starts.data_ptr()
        call.bias_tokens = bias.where.tokens.data_ptr()
        call.bias_values = bias.values.data_ptr()
    if forbidden is not None:
        call.forbidden_starts = forbidden.starts.data_ptr()
        call.forbidden_tokens = forbidden.tokens.data_ptr()
    if penalties is not None:
        call.history_starts = penalties.history.starts.data_ptr()
        call.history_tokens = penalties.history.tokens.data_ptr()
        for name in ("output_starts", "repetition", "frequency", "presence"):
            setattr(call, name, getattr(penalties, name).data_ptr())
    if library.load().sample(call):
        raise ValueError("bias, forbidden or history: a token is outside the vocabulary")
    return tokens


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of tokens [R]; and ids and logprobs [R, num_top] of the likeliest, equal ones by id.

    num_top is cut to the vocabulary, see num_likeliest. All of a row is NaN where one of its logits
    is NaN or plus infinity or none is finite; a negative token's own logprob is.
    """
    check_tokens(logits, tokens)
    check_native(logits)
    num_top = num_likeliest(logits, num_top)
    rows, vocabulary = logits.shape
    own = torch.empty(rows, dtype=torch.float32)
    ids = torch.empty((rows, num_top), dtype=torch.int64)
    values = torch.empty((rows, num_top), dtype=torch.float32)
    call = library.LogprobsCall(
        own=own.data_ptr(),
        top_ids=ids.data_ptr(),
        top_logprobs=values.data_ptr(),
        logits=logits.data_ptr(),
        tokens=tokens.data_ptr(),
        rows=rows,
        vocabulary=vocabulary,
        logits_row=logits.stride(0),
        num_top=num_top,
        is_bf16=logits.dtype == torch.bfloat16,
    )
    if refused := library.load().logprobs(call):
        token = int(tokens[refused - 1])
        raise ValueError(f"tokens must be below {vocabulary}, got {token} for row {refused - 1}")
    return own, ids, values
