"""Holds what the runners said against transformers: tokens, and logits at each position.

The reference computes prompt and output in one forward. Where it prefers the given token at each
position, the output is its greedy one, token by token. Where it does not, its best logit and that
of the given token must be a near tie; such positions are counted.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gpu_worker import sampler
from gpu_worker.ports import ModelRunner
from tests.parity.fake_scheduler import Request

NEAR_TIE = 1e-4
LOGITS_WITHIN = 1e-3
BLOCK_SIZE = 8
HOST_GIB = 1 / 16

Recording = dict[tuple[int, int], torch.Tensor]  # (request's number, output position) -> logits


class ParityError(AssertionError):
    """The runner and the reference differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What a comparison found."""

    num_tokens: int
    num_near_ties: int
    largest_difference: float
    num_distinct_tokens: int


@contextmanager
def recorded_logits() -> Iterator[Recording]:
    """Keeps the logits of every sampled row meanwhile."""
    recording: Recording = {}
    original = sampler.sample

    def recording_sample(logits: torch.Tensor, rows: Sequence[sampler.Row]) -> sampler.Sampled:
        for row, (spec, position, _) in zip(logits, rows, strict=True):
            recording[spec.seed, position] = row.float().clone()
        return original(logits, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "sample", recording_sample)
        yield recording


@torch.inference_mode()
def compare(reference: Any, requests: Sequence[Request], recording: Recording) -> Parity:
    """Raises ParityError where tokens or logits differ by more than rounding."""
    near_ties, largest = 0, 0.0
    distinct: set[int] = set()
    for request in requests:
        if len(request.output) != request.max_tokens:
            raise ParityError(f"{len(request.output)} tokens of {request.max_tokens}")
        tokens = torch.tensor([request.known])
        keep = len(request.output) + 1
        expected = reference(tokens, use_cache=False, logits_to_keep=keep).logits[0, :-1].float()
        ours = torch.stack([recording[request.number, i] for i in range(len(request.output))])
        difference = float((ours - expected).abs().max())
        largest = max(largest, difference)
        if not difference < LOGITS_WITHIN:
            where = int((ours - expected).abs().amax(-1).argmax())
            raise ParityError(f"request {request.number}: logits {difference} apart at {where}")
        given = torch.tensor(request.output)
        behind = expected.amax(-1) - expected.gather(-1, given[:, None])[:, 0]
        if not float(behind.max()) < NEAR_TIE:
            raise ParityError(f"request {request.number}: a token is {float(behind.max())} behind")
        near_ties += int((expected.argmax(-1) != given).sum())
        distinct.update(request.output)
    return Parity(
        num_tokens=sum(len(request.output) for request in requests),
        num_near_ties=near_ties,
        largest_difference=largest,
        num_distinct_tokens=len(distinct),
    )


def runner_of(folder: Any, **changes: Any) -> ModelRunner:
    """A real runner in fp32 with small blocks, and little host memory: tests keep a hundred."""
    import structlog

    from gpu_worker import settings
    from gpu_worker.runner import load_runner

    values = {
        "model": folder,
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 160,
        "swap_space_gib": HOST_GIB,
        "num_threads": 1,
        **changes,
    }
    argv = [
        part
        for name, value in values.items()
        for part in (f"--{name}".replace("_", "-"), str(value))
    ]
    return load_runner(settings.load(argv, {}), structlog.get_logger())
