"""What the sampler is called with: one entry a row in device tensors, and the checks of them.

Real numbers are float64 and whole numbers int64, so that nothing is lost on the way; the sampler
rounds to fp32 where gpu_worker.sampler does. Lists of tokens by row lie one after the other:
`starts` [R + 1] says where each row's begin.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kernels.checks import FLOAT_DTYPES

GREEDY_BELOW = 1e-5  # a temperature under this is greedy
MAX_VOCABULARY = 1 << 30
MAX_TOP = 20  # likeliest tokens that are given beside a token's logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTokens:
    """Tokens of each row: tokens[starts[r]:starts[r + 1]]."""

    starts: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """By the tokens that are there: history is prompt and output, the output from output_starts on.

    output_starts counts in history.tokens.
    """

    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    history: RowTokens
    output_starts: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitBias:
    """Added to logits; a row names a token once."""

    where: RowTokens
    values: Tensor  # float64, one for each of where.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How each row's token is chosen; changes that no row asks for are None and cost nothing."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor  # 0: all
    seed: Tensor  # the bits of an unsigned number
    position: Tensor
    sample_index: Tensor
    bias: LogitBias | None = None
    forbidden: RowTokens | None = None
    penalties: Penalties | None = None

    def to(self, device: torch.device) -> "Sampling":
        """The same on another device; to a CUDA device without waiting for it."""
        return _moved(self, device)

    def within(self, vocabulary: int) -> bool:
        """Whether all tokens that it names are there. Looks at values: call it on the CPU."""
        named = [self.forbidden]
        named += [None if self.bias is None else self.bias.where]
        named += [None if self.penalties is None else self.penalties.history]
        return all(
            part is None
            or not part.tokens.numel()
            or (int(part.tokens.min()) >= 0 and int(part.tokens.max()) < vocabulary)
            for part in named
        )

    @property
    def changes_logits(self) -> bool:
        """Whether any row's logits are changed before its token is chosen."""
        return any(part is not None for part in (self.bias, self.forbidden, self.penalties))


def _moved(part: Any, device: torch.device) -> Any:
    if part is None:
        return None
    if isinstance(part, Tensor):
        if device.type == "cuda" and part.device.type == "cpu":
            return part.pin_memory().to(device, non_blocking=True)
        return part.to(device)
    return type(part)(**{f.name: _moved(getattr(part, f.name), device) for f in fields(part)})


_REALS = ("temperature", "top_p", "min_p")


def check_logits(logits: Tensor) -> None:
    """[rows, vocabulary] with dense rows."""
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_VOCABULARY or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be [rows, vocabulary] with dense rows, got {tuple(logits.shape)}"
        )
    if logits.dtype not in FLOAT_DTYPES:
        raise ValueError(f"logits must be fp32, bf16 or fp16, got {logits.dtype}")


def check_sampling(logits: Tensor, sampling: Sampling) -> None:
    """Shapes, dtypes and devices; values are not looked at."""
    check_logits(logits)
    rows, device = logits.shape[0], logits.device
    for field in fields(Sampling)[:7]:
        real = field.name in _REALS
        _column(field.name, getattr(sampling, field.name), rows, device, real=real)
    if sampling.forbidden is not None:
        _row_tokens("forbidden", sampling.forbidden, rows, device)
    if sampling.bias is not None:
        _row_tokens("bias", sampling.bias.where, rows, device)
        count = sampling.bias.where.tokens.shape[0]
        _column("bias values", sampling.bias.values, count, device, real=True)
    penalties = sampling.penalties
    if penalties is not None:
        _row_tokens("history", penalties.history, rows, device)
        _column("output_starts", penalties.output_starts, rows, device, real=False)
        for name in ("repetition", "frequency", "presence"):
            _column(name, getattr(penalties, name), rows, device, real=True)


def check_tokens(logits: Tensor, tokens: Tensor) -> None:
    """One token a row."""
    check_logits(logits)
    _column("tokens", tokens, logits.shape[0], logits.device, real=False)


def num_likeliest(logits: Tensor, num_top: int) -> int:
    """num_top, which is 0 to MAX_TOP, or the size of the vocabulary if that is less."""
    if not 0 <= num_top <= MAX_TOP:
        raise ValueError(f"num_top must be 0 to {MAX_TOP}, got {num_top}")
    return min(num_top, logits.shape[1])


def _row_tokens(name: str, part: RowTokens, rows: int, device: torch.device) -> None:
    _column(f"{name} starts", part.starts, rows + 1, device, real=False)
    count = part.tokens.shape[0] if part.tokens.dim() == 1 else -1
    _column(f"{name} tokens", part.tokens, count, device, real=False)


def _column(name: str, tensor: Tensor, count: int, device: torch.device, *, real: bool) -> None:
    dtype = torch.float64 if real else torch.int64
    if tensor.shape != (count,) or not tensor.is_contiguous():
        raise ValueError(f"{name} must have one entry for each, got {tuple(tensor.shape)}, {count}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
