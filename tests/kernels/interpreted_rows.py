"""Runs the Triton operators on rows and heads in the interpreter's process; see interpreted."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.kernels.row_cases import GateCase, NormCase, RotaryCase, randn

Case = NormCase | GateCase | RotaryCase


def function_of(case: Case) -> Any:
    """The Triton operator that a case is of."""
    from kernels.gated_activation import gated_activation
    from kernels.rms_norm import rms_norm
    from kernels.rotary_store import rotary_store

    functions = {NormCase: rms_norm, GateCase: gated_activation, RotaryCase: rotary_store}
    return functions[type(case)]


def errors(cases: Sequence[Case]) -> dict[str, float]:
    """Of the cases that are over their tolerance."""
    found = {str(case): case.error(function_of(case)) for case in cases}
    return {name: error for name, error in found.items() if not error <= 1}


def bits_of_torch(case: RotaryCase) -> bool:
    """True when the twin leaves the same bits."""
    from kernels import reference, rotary_store

    kept: list[torch.Tensor] = []

    def recording(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            result = function(*args, **kwargs)
            kept.extend((result, args[1].clone(), args[2].clone()))
            return result

        return call

    case.error(recording(rotary_store.rotary_store))
    case.error(recording(reference.rotary_store))
    return all(torch.equal(a, b) for a, b in zip(kept[:3], kept[3:], strict=True))


def rows_alone() -> bool:
    """True when a row has the same bits alone as among others."""
    from kernels.rms_norm import rms_norm

    x = randn(9, 300, seed=1, dtype=torch.float32)
    weight = randn(300, seed=2, dtype=torch.float32)
    together = rms_norm(x, weight, 1e-5)
    return all(
        torch.equal(rms_norm(x[row : row + 1], weight, 1e-5)[0], together[row]) for row in range(9)
    )


def extremes(gelu: bool) -> float:
    """Greatest difference from torch at gates far out; infinite where NaN differs."""
    from kernels import reference
    from kernels.gated_activation import gated_activation

    gate = torch.tensor([[-1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e30, float("nan")]])
    both = torch.cat((gate, torch.ones_like(gate)), 1)
    got, want = gated_activation(both, gelu=gelu), reference.gated_activation(both, gelu=gelu)
    if not torch.equal(got.isnan(), want.isnan()):
        return float("inf")
    return float(((got - want).abs() / (1 + want.abs())).nan_to_num().max())


def refusal(name: str) -> str:
    """With what words a planted mistake is refused; "" where it is not."""
    from kernels.gated_activation import gated_activation
    from kernels.rms_norm import rms_norm
    from kernels.rotary_store import rotary_store

    ones = torch.ones
    cache = ones(2, 2, 5, 64)
    rotary: list[Any] = [ones(3, 7 * 64), cache, cache, ones(3).long(), ones(3).long()]
    rotary += [ones(9, 32), ones(9, 32)]
    changes: dict[str, tuple[int, Any]] = {
        "rotary_columns": (0, ones(3, 4 * 64)),
        "rotary_dtype": (0, ones(3, 7 * 64).half()),
        "rotary_slots": (3, ones(3).int()),
        "rotary_positions": (4, ones(2).long()),
        "rotary_half": (5, ones(9, 33)),
        "rotary_device": (6, ones(9, 32, device="meta")),
    }
    try:
        if name in changes:
            at, value = changes[name]
            rotary[at] = value
            rotary_store(*rotary)
        elif name == "norm_width":
            rms_norm(ones(1, 32_769), ones(32_769), 1.0)
        elif name == "norm_double":
            rms_norm(ones(1, 4).double(), ones(4).double(), 1.0)
        elif name == "norm_weight":
            rms_norm(ones(2, 3), ones(4), 1.0)
        elif name == "norm_delta":
            rms_norm(ones(2, 3), ones(3), 1.0, delta=ones(1, 3))
        elif name == "gate_odd":
            gated_activation(ones(2, 3))
        elif name == "gate_whole":
            gated_activation(ones(2, 4).long())
        else:
            gated_activation(ones(2, 4, device="meta"))
    except ValueError as error:
        return str(error)
    return ""


REFUSALS = {
    "rotary_columns": "qkv must be",
    "rotary_dtype": "one dtype",
    "rotary_slots": "slot_mapping must be int64",
    "rotary_positions": "positions must have one entry",
    "rotary_half": "cosine and sine must be",
    "rotary_device": "sine must be on cpu",
    "norm_width": "1 to 32768 elements",
    "norm_double": "fp32, bf16 or fp16",
    "norm_weight": "weight must be",
    "norm_delta": "delta must have",
    "gate_odd": "both must be",
    "gate_whole": "fp32, bf16 or fp16",
    "gate_device": "takes CPU tensors, got meta",
}
