"""Linear layers over packed weights; linear.cpp has the formula and the order of its sums."""

import statistics
import time
from typing import Protocol

import torch
from torch import Tensor

from kernels.checks import check_linear, check_native
from kernels.native import library, memory

LANES = 16
# Kinds of packed weights, as linear.cpp numbers them.
FP32, BF16, BF16_PAIRS, BF16_HALVES = 0, 1, 2, 3

TIMED_ROWS = (1, 32)  # a single request, and a full batch
TIMED_CALLS = 5
CLEARLY = 0.9  # oneDNN must take less than this share of the native layer's time
# Torch's OpenMP threads look out for work for several milliseconds, unless OMP_WAIT_POLICY is
# PASSIVE: so long the native layer has one core, and is judged slow.
PAUSE_S = 0.025
_onednn_is_faster: dict[tuple[int, int, torch.dtype], bool] = {}


def fits_bf16(weight: Tensor) -> bool:
    """Whether bf16 holds every weight exactly, as it does when the model was saved in bf16."""
    rows = max(1, (1 << 22) // max(1, weight.shape[1]))
    return all(bool((part.bfloat16().to(part.dtype) == part).all()) for part in weight.split(rows))


def pack(weight: Tensor, kind: int) -> Tensor:
    """weight [N, K] as panels of 16 columns, zeros after the last: [panels, K, 16] or as pairs.

    As halves the columns of a panel stand in the order 0, 8, 1, 9, .., 15.
    """
    columns, depth = weight.shape
    missing = -columns % LANES
    if missing:
        weight = torch.cat((weight, weight.new_zeros((missing, depth))))
    panels = weight.to(torch.float32 if kind == FP32 else torch.bfloat16)
    steps = (depth // 2, 2) if kind == BF16_PAIRS else (depth,)
    panels = panels.view(-1, LANES, *steps).transpose(1, 2)
    if kind == BF16_HALVES:
        panels = panels.unflatten(2, (2, LANES // 2)).transpose(2, 3).flatten(2)
    return memory.zeros(tuple(panels.shape), panels.dtype).copy_(panels)


class Linear(Protocol):
    """x -> x weight^T + bias for x [T, K] of the weights' dtype."""

    kind: str  # what multiplies, for people

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N], a fresh tensor."""


class PackedLinear:
    """On the kernel of linear.cpp, fp32 or bf16: a row's bits are its own."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        check_native(weight)
        check_linear(weight, bias)
        loaded = library.load()
        self.dtype = weight.dtype
        self.kind = "native"
        self.columns, self.depth = weight.shape
        self._inputs = torch.Size((self.depth,))
        if weight.dtype == torch.float32:
            kind = loaded.bf16_kind if fits_bf16(weight) else FP32
        else:
            pairs = loaded.takes_pairs and self.depth % 2 == 0
            kind = BF16_PAIRS if pairs else loaded.bf16_kind
        self.packed = pack(weight, kind)
        self._bias = None if bias is None else bias.float().contiguous()
        self._function = loaded.linear
        self._call = library.LinearCall(
            packed=self.packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            columns=self.columns,
            depth=self.depth,
            out_row=self.columns,
            x_is_bf16=self.dtype == torch.bfloat16,
            packed_kind=kind,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N], a fresh tensor."""
        out = torch.empty((x.shape[0], self.columns), dtype=self.dtype)
        refused = self._function(self.bind(x, out))
        assert not refused, "a kind of weights that this library does not multiply"
        return out

    def bind(self, x: Tensor, out: Tensor) -> library.LinearCall:
        """The call, checked, for `out` [T, N], which is dense; good until the next one."""
        if x.dtype != self.dtype or x.shape[1:] != self._inputs or x.stride(1) != 1 or not x.is_cpu:
            raise ValueError(
                f"x must be [rows, {self.depth}] of {self.dtype} with dense rows, got "
                f"{tuple(x.shape)} of {x.dtype}"
            )
        call = self._call
        call.out, call.x = out.data_ptr(), x.data_ptr()
        call.rows, call.x_row = x.shape[0], x.stride(0)
        return call


class OneDnnLinear:
    """On oneDNN's packed weights. Which sums it makes may depend on the number of rows.

    In fp32 its bits are not those of torch's plain layer, which does not use oneDNN.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        check_native(weight)
        check_linear(weight, bias)
        self.kind = "onednn"
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TIMED_ROWS[-1])
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N], a fresh tensor."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return out


def onednn_takes_bf16() -> bool:
    """Whether oneDNN multiplies bf16 on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def choose_linear(weight: Tensor, bias: Tensor | None, *, deterministic: bool) -> Linear:
    """The native layer; for bf16 the faster one of it and oneDNN's, measured once per shape.

    fp32 is not measured: the native one is taken though oneDNN's can be faster at many rows. Its
    sums are the same in every batch and on every machine, and weights that bf16 holds take half the
    memory. Nor is anything measured when rows must not depend on the batch.
    """
    native = PackedLinear(weight, bias)
    if deterministic or weight.dtype == torch.float32 or not onednn_takes_bf16():
        return native
    shape = (*weight.shape, weight.dtype)
    if shape not in _onednn_is_faster:
        other = OneDnnLinear(weight, bias)
        time.sleep(PAUSE_S)
        ours, theirs = (
            sum(_seconds(of, rows, weight) for rows in TIMED_ROWS) for of in (native, other)
        )
        _onednn_is_faster[shape] = theirs < CLEARLY * ours
    return OneDnnLinear(weight, bias) if _onednn_is_faster[shape] else native


def _seconds(linear: Linear, rows: int, weight: Tensor) -> float:
    """Median of a few calls."""
    x = torch.ones((rows, weight.shape[1]), dtype=weight.dtype)
    linear(x)
    times = []
    for _ in range(TIMED_CALLS):
        began = time.perf_counter()
        linear(x)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
