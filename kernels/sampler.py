"""Launches the sampler's Triton kernels: each row's next token, without waiting for the device.

Torch twin: kernels.reference_sampling.sample; both follow gpu_worker.sampler, which has the rules.
"""

import torch
import triton
from torch import Tensor

from kernels.checks import check_runs_triton, interpreted
from kernels.sampler_kernels import (
    change_tokens_kernel,
    count_kernel,
    penalize_kernel,
    sample_kernel,
)
from kernels.sampling import Penalties, Sampling, check_sampling
from kernels.tiles import (
    ELEMENTWISE_BLOCK,
    INTERPRETER_VOCABULARY_BLOCK,
    VOCABULARY_BLOCK,
    VOCABULARY_WARPS,
)

LIST_BLOCK = 256  # entries of a row's lists that a program does in one turn
EXACT = {"enable_fp_fusion": False}  # products are rounded before they are added


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """Tokens [R] int64 on logits' device; -1 where a row's logits are not finite.

    Does not change `logits`.
    """
    check_sampling(logits, sampling)
    check_runs_triton(logits.device, sample_kernel)
    num_rows, vocabulary = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    if sampling.changes_logits:
        logits = _changed(logits, sampling)
    sample_kernel[(num_rows,)](
        tokens,
        logits,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.top_k,
        sampling.seed,
        sampling.position,
        sampling.sample_index,
        logits.stride(0),
        VOCAB=vocabulary,
        BLOCK=vocabulary_block(),
        num_warps=VOCABULARY_WARPS,
    )
    return tokens


def vocabulary_block() -> int:
    """Logits that a program reads in one turn."""
    return INTERPRETER_VOCABULARY_BLOCK if interpreted(sample_kernel) else VOCABULARY_BLOCK


def _changed(logits: Tensor, sampling: Sampling) -> Tensor:
    """A copy in fp32 with bias, forbidden tokens and penalties."""
    changed = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    bias, forbidden = sampling.bias, sampling.forbidden
    if bias is not None or forbidden is not None:
        change_tokens_kernel[(logits.shape[0],)](
            changed,
            None if bias is None else bias.where.starts,
            None if bias is None else bias.where.tokens,
            None if bias is None else bias.values,
            None if forbidden is None else forbidden.starts,
            None if forbidden is None else forbidden.tokens,
            changed.stride(0),
            VOCAB=changed.shape[1],
            BLOCK=LIST_BLOCK,
            HAS_BIAS=bias is not None,
            HAS_FORBIDDEN=forbidden is not None,
            num_warps=4,
        )
    if sampling.penalties is not None:
        _penalize(changed, sampling.penalties)
    return changed


def _penalize(logits: Tensor, penalties: Penalties) -> None:
    num_rows, vocabulary = logits.shape
    counts = torch.zeros((num_rows, vocabulary), dtype=torch.int32, device=logits.device)
    count_kernel[(num_rows,)](
        counts,
        penalties.history.starts,
        penalties.history.tokens,
        penalties.output_starts,
        counts.stride(0),
        VOCAB=vocabulary,
        BLOCK=LIST_BLOCK,
        num_warps=4,
    )
    block = min(vocabulary_block(), ELEMENTWISE_BLOCK)
    penalize_kernel[(num_rows, triton.cdiv(vocabulary, block))](
        logits,
        counts,
        penalties.repetition,
        penalties.frequency,
        penalties.presence,
        logits.stride(0),
        counts.stride(0),
        VOCAB=vocabulary,
        BLOCK=block,
        num_warps=4,
        **EXACT,
    )
