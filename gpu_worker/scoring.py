"""Owns logprobs: of tokens already known, of those just sampled, and of the likeliest beside each.

A logprob is the natural log softmax of the model's own logits, in fp32. The likeliest tokens are
the largest logits, equal ones by token id. Known tokens are scored as their positions are computed;
of many positions no more than SLICE have their logits in memory at once: the lean forward or the
model's backbone runs once, and the head over one slice after the other. A forward of modules that
does not go through the backbone is run again for each slice.

A row whose logits are not finite at a scored position fails alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_worker import models
from gpu_worker.attention import PagedContext, StepTables
from gpu_worker.batch import FlatBatch
from gpu_worker.ports import LogprobRows, ScheduledRow
from kernels.checks import NATIVE_DTYPES
from kernels.sampling import MAX_TOP

SLICE = 256

Kernel = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
Floats = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Of n positions: logprobs [n] of their tokens, and the likeliest tokens [n, most wanted].

    A logprob is NaN where the logits are not finite.
    """

    logprobs: Floats
    top_token_ids: Int32s
    top_logprobs: Floats


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> Scores:
    """`logits` [n, vocabulary] against the n tokens that follow. Does not change `logits`."""
    kernel = _kernel_for(logits)
    if kernel is not None and num_top <= MAX_TOP:
        own, top, top_logprobs = kernel(logits, token_ids, num_top)
        return Scores(
            logprobs=own.cpu().numpy(),
            top_token_ids=top.cpu().numpy().astype(np.int32),
            top_logprobs=top_logprobs.cpu().numpy(),
        )
    wide = logits.float()
    total = wide.logsumexp(-1, keepdim=True)
    total = torch.where(total.isfinite(), total, torch.nan)
    own = wide.gather(-1, token_ids[:, None]) - total
    top = _largest(wide, min(num_top, wide.shape[-1]))
    return Scores(
        logprobs=own[:, 0].cpu().numpy(),
        top_token_ids=top.cpu().numpy().astype(np.int32),
        top_logprobs=(wide.gather(-1, top) - total).cpu().numpy(),
    )


def _kernel_for(logits: Tensor) -> Kernel | None:
    if logits.device.type == "cuda":
        return _device_logprobs()
    return _native_logprobs() if logits.dtype in NATIVE_DTYPES else None


@cache
def _device_logprobs() -> Kernel | None:
    """The Triton kernel; None without Triton."""
    try:
        from kernels.logprobs import logprobs
    except ImportError:
        return None
    return logprobs


@cache
def _native_logprobs() -> Kernel | None:
    """None where there are no native kernels."""
    from kernels.native import library, sampling

    return None if library.reason_unavailable() else sampling.logprobs


def _largest(logits: Tensor, count: int) -> Tensor:
    """Ids [n, count] of the largest, largest first, equal ones by id, whatever topk does."""
    values, ids = logits.topk(count)
    if not count:
        return ids
    least = values[:, -1:]
    num_taken, num_equal = (values == least).sum(-1), (logits == least).sum(-1)
    for row in (num_taken < num_equal).nonzero()[:, 0].tolist():
        # More tokens equal the last one than there is room for: the first of them.
        taken = int(num_taken[row])
        ids[row, count - taken :] = (logits[row] == least[row]).nonzero()[:taken, 0]
    ids = ids.sort(-1).values
    order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)


def forward(
    model: models.LoadedModel,
    context: PagedContext,
    step: StepTables,
    batch: FlatBatch,
    rows: Sequence[ScheduledRow],
) -> tuple[Tensor, Scores]:
    """As models.forward of the rows that sample; and the scores of batch.scored_indices."""
    device = model.device
    token_ids, positions, sampling, scored = (
        torch.from_numpy(array).to(device)
        for array in (batch.token_ids, batch.positions, batch.logits_indices, batch.scored_indices)
    )
    wanted = [rows[index] for index in batch.scored_rows]
    next_ids = torch.tensor([t for row in wanted for t in row.scored_token_ids], device=device)
    num_top = max(row.sampling.num_logprobs or 0 for row in wanted)
    if model.fused is not None:
        wanted_rows = torch.cat((sampling, scored))
        hidden = model.fused.hidden(context, step, token_ids, positions, wanted_rows)
        logits, parts = _in_slices(model.fused.head, hidden, len(sampling), next_ids, num_top)
        return logits, _joined(parts)
    size = SLICE if model.keeps_logits else len(scored)  # one that keeps none makes all of them
    with ExitStack() as stack:
        kept: list[Any] = []
        if len(scored) > size and model.module.base_model is not model.module:
            kept = stack.enter_context(_kept_output(model.module.base_model))
        first = torch.cat((sampling, scored[:size]))
        logits = models.forward(model, context, step, token_ids, positions, first)
    parts = [score(logits[len(sampling) :], next_ids[:size], num_top)]
    logits = logits[: len(sampling)]
    for begin in range(size, len(scored), size):
        part = slice(begin, begin + size)
        if kept:
            more = _head(model.module, kept[0], token_ids, scored[part])
        else:
            more = models.forward(model, context, step, token_ids, positions, scored[part])
        parts.append(score(more, next_ids[part], num_top))
    return logits, _joined(parts)


def _in_slices(
    head: Callable[[Tensor], Tensor], hidden: Tensor, num_rows: int, next_ids: Tensor, num_top: int
) -> tuple[Tensor, list[Scores]]:
    """Logits of the first num_rows of `hidden`; scores of the others, SLICE of them at a time."""
    first = head(hidden[: num_rows + SLICE])
    parts = [score(first[num_rows:], next_ids[:SLICE], num_top)]
    for begin in range(SLICE, len(next_ids), SLICE):
        part = slice(begin, begin + SLICE)
        parts.append(score(head(hidden[num_rows:][part]), next_ids[part], num_top))
    return first[:num_rows], parts


def _joined(parts: Sequence[Scores]) -> Scores:
    return Scores(
        logprobs=np.concatenate([part.logprobs for part in parts]),
        top_token_ids=np.concatenate([part.top_token_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )


@contextmanager
def _kept_output(backbone: Any) -> Iterator[list[Any]]:
    """Keeps what the backbone gives meanwhile."""
    kept: list[Any] = []
    hook = backbone.register_forward_hook(lambda _module, _given, output: kept.append(output))
    try:
        yield kept
    finally:
        hook.remove()


def _head(module: Any, output: Any, token_ids: Tensor, indices: Tensor) -> Tensor:
    """Logits at `indices` from what the backbone gave before, scaled or capped as the model does.

    The model's own forward runs, with a backbone that answers at once.
    """
    backbone = module.base_model
    before = vars(backbone).get("forward")
    backbone.forward = lambda *_args, **_kwargs: output
    try:
        given = module(input_ids=token_ids[None], use_cache=False, logits_to_keep=indices)
    finally:
        if before is None:
            del backbone.forward
        else:
            backbone.forward = before
    logits: Tensor = given.logits[0]
    return logits


def step_logprobs(
    rows: Sequence[ScheduledRow],
    batch: FlatBatch,
    known: Scores | None,
    logits: Tensor,
    tokens: dict[int, int | None],
) -> tuple[dict[int, LogprobRows], dict[int, str]]:
    """Logprobs of a step by row, and the reasons of rows that fail.

    `tokens` has the rows that sample, in the order of `logits`, and what they got; None where that
    failed. A row's logprobs are those of its scored tokens, then that of its sampled one.
    """
    found: dict[int, LogprobRows] = {}
    failures: dict[int, str] = {}
    if known is not None:
        spans = [(index, len(rows[index].scored_token_ids)) for index in batch.scored_rows]
        _share_out(known, spans, rows, found, failures)
    asked = [
        (place, index, token)
        for place, (index, token) in enumerate(tokens.items())
        if token is not None and rows[index].sampling.num_logprobs is not None
    ]
    if asked:
        places, indices, chosen = zip(*asked, strict=True)
        device = logits.device
        num_top = max(rows[index].sampling.num_logprobs or 0 for index in indices)
        scores = score(
            logits[torch.tensor(places, device=device)],
            torch.tensor(chosen, device=device),
            num_top,
        )
        _share_out(scores, [(index, 1) for index in indices], rows, found, failures)
    return {index: row for index, row in found.items() if index not in failures}, failures


def _share_out(
    scores: Scores,
    spans: Sequence[tuple[int, int]],
    rows: Sequence[ScheduledRow],
    found: dict[int, LogprobRows],
    failures: dict[int, str],
) -> None:
    """Adds to each row of `spans` (row, number of positions) its part."""
    begin = 0
    for index, count in spans:
        part = slice(begin, begin + count)
        begin += count
        if np.isnan(scores.logprobs[part]).any():
            failures[index] = "logits are not finite"
            continue
        num_top = min(rows[index].sampling.num_logprobs or 0, scores.top_token_ids.shape[1])
        new = LogprobRows.from_bytes(
            num_top,
            scores.logprobs[part].tobytes(),
            scores.top_token_ids[part, :num_top].tobytes(),
            scores.top_logprobs[part, :num_top].tobytes(),
        )
        found[index] = found[index].then(new) if index in found else new
