"""The Triton operators on a device, against the same cases as in the interpreter.

Used by test_on_device, and by the GPU script, which runs as many as its time allows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.sampling import Sampling
from tests.kernels.cases import Case, build, expected, worst
from tests.kernels.interpreted_sampling import Case as SamplingCase
from tests.kernels.row_cases import GATES, NORMS, ROTARIES, GateCase, NormCase
from tests.kernels.shapes import CASES
from tests.kernels.storing import differs

Check = Callable[[], float]  # the error in tolerances: at most 1 passes
DTYPES = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16)
STORES = ((0, 64, 16), (1, 64, 4), (37, 80, 16), (19, 256, 5))


def carried(tensor: Tensor, device: torch.device) -> Tensor:
    """The same strides and offset on the device: its whole storage goes over."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.as_strided(tensor, (count,), (1,), 0).to(device, copy=True)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def through(function: Any, device: torch.device) -> Any:
    """Takes CPU tensors and computes on the device; what changed there is copied back."""

    def over(value: Any) -> Any:
        if isinstance(value, Tensor):
            return carried(value, device)
        return value.to(device) if isinstance(value, Sampling) else value

    def back(value: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        if isinstance(value, tuple):
            return tuple(back(part, pairs) for part in value)
        for ours, theirs in pairs:
            if value.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr():
                return ours.as_strided(value.shape, value.stride(), value.storage_offset())
        return value.cpu()

    def call(*args: Any, **kwargs: Any) -> Any:
        moved = [over(value) for value in args]
        named = {name: over(value) for name, value in kwargs.items()}
        result = function(*moved, **named)
        before, after = (*args, *kwargs.values()), (*moved, *named.values())
        pairs = [
            (old, new)
            for old, new in zip(before, after, strict=True)
            if isinstance(old, Tensor) and old.numel()
        ]
        for ours, theirs in pairs:
            ours.copy_(theirs)
        return None if result is None else back(result, pairs)

    return call


def attention_check(case: Case, device: torch.device) -> Check:
    """Against dense float64."""

    def check() -> float:
        from kernels.paged_attention import paged_attention

        tensors = build(case)
        out = tensors.call(through(paged_attention, device), case)
        return worst(out, expected(case, tensors), case.dtype)

    return check


def row_check(case: Any, device: torch.device) -> Check:
    """Of norm, activation or rotary embedding."""

    def check() -> float:
        from kernels.gated_activation import gated_activation
        from kernels.rms_norm import rms_norm
        from kernels.rotary_store import rotary_store

        function: Any = rotary_store
        if isinstance(case, NormCase | GateCase):
            function = rms_norm if isinstance(case, NormCase) else gated_activation
        error: float = case.error(through(function, device))
        return error

    return check


def sampling_check(case: SamplingCase, device: torch.device) -> Check:
    """Every row's token must be the worker's own."""

    def check() -> float:
        from kernels.sampler import sample

        return 2.0 * len(case.differences(through(sample, device)))

    return check


def logprobs_check(case: SamplingCase, device: torch.device) -> Check:
    """Within 1e-5, the likeliest tokens the same ones."""

    def check() -> float:
        from kernels import reference_sampling
        from kernels.logprobs import logprobs

        logits = case.logits()
        tokens = torch.arange(case.num_rows) * 7 % case.vocabulary
        got = through(logprobs, device)(logits, tokens, 20)
        want = reference_sampling.logprobs(logits, tokens, 20)
        if not torch.equal(got[1], want[1]):
            return float("inf")
        return float(max((got[i] - want[i]).abs().max() for i in (0, 2))) / 1e-5

    return check


def store_check(shape: tuple[int, int, int], device: torch.device) -> Check:
    """Bit for bit."""

    def check() -> float:
        from kernels.kv_store import store_kv

        return 2.0 * differs(through(store_kv, device), *shape, 3)

    return check


def checks(device: torch.device, vocabularies: tuple[int, ...]) -> list[tuple[str, Check]]:
    """All of them by name, kinds mixed so that any part of the list has some of each."""
    attention = [case.at(DTYPES[i % 4]) for i, case in enumerate(CASES)]
    groups: list[list[tuple[str, Check]]] = [
        [(f"attention {c} {c.dtype}", attention_check(c, device)) for c in attention],
        [(str(c), row_check(c, device)) for c in (*NORMS, *GATES, *ROTARIES)],
        [(f"store {shape}", store_check(shape, device)) for shape in STORES],
    ]
    sampled = [
        SamplingCase(kind=kind, num_rows=8, vocabulary=size, changed=changed, seed=seed)
        for size in vocabularies
        for seed, kind in enumerate(("plain", "tied", "peaked", "far"))
        for changed in (False, True)
    ]
    groups.append([(f"sample {c}", sampling_check(c, device)) for c in sampled])
    groups.append([(f"logprobs {c}", logprobs_check(c, device)) for c in sampled[::2]])
    placed = [
        ((at + 0.5) / len(group), number, entry)
        for number, group in enumerate(groups)
        for at, entry in enumerate(group)
    ]
    return [entry for _, _, entry in sorted(placed, key=lambda item: item[:2])]
