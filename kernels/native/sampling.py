"""The native sampler: sample.cpp on the columns of kernels.sampling."""

import torch
from torch import Tensor

from kernels.checks import check_native
from kernels.native import library
from kernels.sampling import Sampling, check_sampling


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
