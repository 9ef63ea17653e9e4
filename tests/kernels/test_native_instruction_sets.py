"""The kernels compiled for each instruction set that runs here: right answers, the same bits.

All other tests take the library that a worker would take, the best one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.native import library, operators, sampling
from kernels.native.linear import PackedLinear
from kernels.native.quantized import QuantizedLinear
from kernels.quantization import quantize
from tests.kernels.cases import Case, build, expected, worst
from tests.kernels.native import instruction_sets, needs_native
from tests.kernels.row_cases import GATES, NORMS, ROTARIES, randn, worst_of
from tests.kernels.sampling_cases import on_host, random_logits, random_rows, tensors

pytestmark = needs_native
SETS = instruction_sets()
DTYPES = (torch.float32, torch.bfloat16)

ATTENTION = [
    Case(
        rows=((70, 590), (1, 90), (33, 33), (1, 700)),
        num_heads=6,
        window=300,
        softcap=20.0,
        sinks=True,
    ),
    Case(rows=((40, 300), (1, 270)), num_heads=7, num_kv_heads=1, head_dim=70, block_size=8),
    Case(rows=((9, 270), (1, 600)), head_dim=256, block_size=128),
]
DEPTH = 320


@contextmanager
def only(name: str) -> Iterator[None]:
    """Meanwhile the kernels are those of one set."""
    loaded = library.load(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load", lambda: loaded)
        yield


@dataclass(slots=True)
class Seen:
    """What operators gave, and left in the tensors that they were given."""

    error: float = 0.0  # in tolerances: at most 1 passes
    bits: list[Tensor] = field(default_factory=list)

    def through(self, function: Any) -> Any:
        """The operator; each call is kept."""

        def call(*arguments: Any, **more: Any) -> Any:
            given = function(*arguments, **more)
            left = [x for x in (given, *arguments) if isinstance(x, Tensor)]
            self.bits += [x.contiguous().view(torch.uint8).clone() for x in left]
            return given

        return call

    def found(self, error: float) -> None:
        self.error = max(self.error, error)


def attention(dtype: torch.dtype, seen: Seen) -> None:
    for case in ATTENTION:
        made = build(case.at(dtype))
        out = made.call(seen.through(operators.paged_attention), case)
        seen.found(worst(out, expected(case, made), dtype))


def rows(dtype: torch.dtype, seen: Seen) -> None:
    """Norm, activation, rotary embedding with the store."""
    of = ((NORMS, "rms_norm"), (GATES, "gated_activation"), (ROTARIES, "rotary_store"))
    for cases, name in of:
        for case in (case for case in cases if case.dtype == dtype):
            seen.found(case.error(seen.through(getattr(operators, name))))


def linear(dtype: torch.dtype, seen: Seen) -> None:
    """With a bias; weights that bf16 holds, and others."""
    weight, bias = randn(100, DEPTH, seed=1, dtype=dtype), randn(100, seed=2, dtype=dtype)
    for weights in (weight, weight.bfloat16().to(dtype)):
        multiplied(seen, PackedLinear(weights, bias), weights, bias)


def quantized(dtype: torch.dtype, seen: Seen) -> None:
    """Weights of 8 and 4 bits."""
    weight, bias = randn(100, DEPTH, seed=1, dtype=dtype), randn(100, seed=2, dtype=dtype)
    for bits in (8, 4):
        levels = quantize(weight, bits).dequantized()
        multiplied(seen, QuantizedLinear(weight, bias, bits=bits), levels, bias)


def multiplied(seen: Seen, layer: Any, weight: Tensor, bias: Tensor) -> None:
    for num_rows in (1, 7, 33):
        x = randn(num_rows, DEPTH, seed=num_rows, dtype=bias.dtype)
        want = x.double() @ weight.double().T + bias.double()
        # Terms of size 1: their sum's rounding goes with the number of them, not with its size.
        size = want.abs() + DEPTH**0.5
        seen.found(worst_of(seen.through(layer)(x), want, size))


def sampler(dtype: torch.dtype, seen: Seen) -> None:
    """Right where the worker's own chooses the same tokens."""
    for seed, kind in enumerate(("plain", "tied", "peaked", "far")):
        logits = random_logits(kind, 24, 1003, seed).to(dtype)
        chosen = random_rows(24, 1003, seed, changed=True)
        found = seen.through(sampling.sample)(logits, tensors(chosen, 1003))
        seen.found(0.0 if found.tolist() == on_host(logits, chosen) else float("inf"))


KINDS: dict[str, Callable[[torch.dtype, Seen], None]] = {
    kind.__name__: kind for kind in (attention, rows, linear, quantized, sampler)
}


@cache
def seen_on(name: str, kind: str, dtype: torch.dtype) -> Seen:
    seen = Seen()
    with only(name):
        KINDS[kind](dtype, seen)
    return seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETS)
def test_each_set_gives_right_answers(name: str, kind: str, dtype: torch.dtype) -> None:
    seen = seen_on(name, kind, dtype)
    assert seen.bits
    assert seen.error <= 1


@pytest.mark.skipif(len(SETS) == 1, reason="one instruction set runs here: nothing to compare")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETS[1:])
def test_all_sets_give_the_same_bits(name: str, kind: str, dtype: torch.dtype) -> None:
    if kind == "linear" and dtype == torch.bfloat16 and library.load(name).takes_pairs:
        pytest.skip("bf16 is multiplied in pairs here, whose sums are their own")
    ours, theirs = seen_on(name, kind, dtype).bits, seen_on(SETS[0], kind, dtype).bits
    assert len(ours) == len(theirs) > 0
    pairs = enumerate(zip(ours, theirs, strict=True))
    assert [number for number, (one, other) in pairs if not torch.equal(one, other)] == []
