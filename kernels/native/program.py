"""A model's layers as one native call; program.cpp says why.

Owns the memory between operators: it is kept from step to step and grows with the largest step, so
that the calls of norms, linear layers and activations stay as they are until another number of
rows comes. A step's own calls, of rotary store and attention, are bound once for all layers that
share them. The arithmetic is that of the operators, so a program's bits are theirs.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.native import library, operators
from kernels.native.linear import PackedLinear
from kernels.native.operators import Attention, GatedActivation, RmsNorm, RotaryStore
from kernels.native.quantized import QuantizedLinear

# As program.cpp numbers them.
NORM, LINEAR, QUANTIZED, ROTARY, ATTENTION, GATE = range(6)
LEAST_ROWS = 32  # that there is memory for

NativeLinear = PackedLinear | QuantizedLinear
NATIVE_LINEAR = (PackedLinear, QuantizedLinear)
LayerStep = tuple[RotaryStore, Attention, Tensor, Tensor]  # with its keys' and values' cache


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOperators:
    """Of one layer; norms that a model lacks are None."""

    before_attention: RmsNorm
    after_attention: RmsNorm | None
    before_mlp: RmsNorm
    after_mlp: RmsNorm | None
    q_weight: Tensor | None  # of norms over heads
    k_weight: Tensor | None
    qkv: NativeLinear
    out: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear
    activation: GatedActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    """Rows of what one operator leaves for another."""

    x: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    delta: Tensor
    delta_normed: Tensor
    both: Tensor
    gated: Tensor

    @classmethod
    def of(cls, layer: LayerOperators, rows: int) -> "_Buffers":
        widths = {
            "x": layer.qkv.depth,
            "normed": layer.qkv.depth,
            "qkv": layer.qkv.columns,
            "attended": layer.out.depth,
            "delta": layer.out.columns,
            "delta_normed": layer.out.columns,
            "both": layer.gate_up.columns,
            "gated": layer.down.depth,
        }
        with torch.inference_mode(mode=False):  # steps within it and without may write here
            return cls(
                **{
                    name: torch.empty((rows, width), dtype=layer.qkv.dtype)
                    for name, width in widths.items()
                }
            )


class Program:
    """All layers up to the attention of the last one. One step at a time."""

    def __init__(self, layers: Sequence[LayerOperators]) -> None:
        self._layers = layers
        self._function = library.load().program
        self._capacity = self._rows = 0
        self._buffers = _Buffers.of(layers[0], 0)
        self._parts: list[library.Part] = []
        self._calls: list[Any] = []  # whose rows are the step's
        self._of_steps: list[tuple[library.Part, library.Part]] = []  # rotary store and attention
        self._array: Any = None
        self._checked: dict[int, Tensor] = {}  # caches, by their ids
        self._lay_out(LEAST_ROWS)

    def run(self, x: Tensor, steps: Sequence[LayerStep]) -> tuple[Tensor, Tensor]:
        """x [T, D] with all residuals before the last layer's MLP but its attention's, and what
        that attention gives [T, Hq * D'].

        Both stand in memory that the next call overwrites. Raises ValueError as the operators do.
        """
        rows, like = x.shape[0], self._buffers.x
        if x.shape[1:] != like.shape[1:] or x.dtype != like.dtype:
            raise ValueError(
                f"x must be [rows, {like.shape[1]}] of {like.dtype}, got {tuple(x.shape)} of "
                f"{x.dtype}"
            )
        if rows > self._capacity:
            self._lay_out(max(LEAST_ROWS, 1 << (rows - 1).bit_length()))
        if rows != self._rows:
            for call in self._calls:
                call.rows = rows
            self._rows = rows
        buffers = self._buffers
        buffers.x[:rows].copy_(x)
        qkv, attended = buffers.qkv[:rows], buffers.attended[:rows]
        bound: dict[int, int] = {}
        for layer, step, parts in zip(self._layers, steps, self._of_steps, strict=True):
            store, attend, keys, values = step
            self._check_caches(step, steps)
            if id(store) not in bound:
                rotary = store.bind(qkv, keys, values, layer.q_weight, layer.k_weight)
                bound[id(store)] = ctypes.addressof(rotary)
            if id(attend) not in bound:
                queries = store.queries(qkv)
                call = attend.bind(queries, keys, values, attended.view(queries.shape))
                bound[id(attend)] = ctypes.addressof(call)
            k_cache, v_cache = keys.data_ptr(), values.data_ptr()
            for part, of in zip(parts, (store, attend), strict=True):
                part.call, part.k_cache, part.v_cache = bound[id(of)], k_cache, v_cache
        self._run()
        return buffers.x[:rows], attended

    def _check_caches(self, step: LayerStep, steps: Sequence[LayerStep]) -> None:
        """What is bound for one layer's cache is right for those of all that share it.

        A worker's caches are the same tensors in each step, so each is looked at once.
        """
        store, attend, keys, values = step
        if self._checked.get(id(keys)) is keys and self._checked.get(id(values)) is values:
            return
        for other in steps:
            if other[0] is store or other[1] is attend:
                for mine, first in ((keys, other[2]), (values, other[3])):
                    if (
                        mine.shape != first.shape
                        or mine.stride() != first.stride()
                        or mine.dtype != first.dtype
                    ):
                        raise ValueError(
                            "layers that share an operator must have caches of one shape: "
                            f"{tuple(mine.shape)} of {mine.dtype} beside {tuple(first.shape)} "
                            f"of {first.dtype}"
                        )
        if len(self._checked) >= 4 * len(self._layers):
            self._checked.clear()
        self._checked[id(keys)], self._checked[id(values)] = keys, values

    def _run(self) -> None:
        refusal = ctypes.c_int64()
        done = self._function(self._array, len(self._array), ctypes.byref(refusal))
        if done == len(self._array):
            return
        kind = self._array[done].kind
        if kind == ROTARY:
            raise ValueError(operators.refusal_of_rotary_store(refusal.value))
        assert kind == ATTENTION, "a kind of weights that this library does not multiply"
        raise ValueError(operators.refusal_of_attention(refusal.value))

    def _lay_out(self, capacity: int) -> None:
        """All parts, over memory for so many rows."""
        self._capacity = self._rows = capacity
        self._buffers = _Buffers.of(self._layers[0], capacity)
        self._parts, self._calls = [], []
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            delta = self._add_layer(layer, delta, is_last=index == len(self._layers) - 1)
        self._array = (library.Part * len(self._parts))(*self._parts)
        placed = iter([part for part in self._array if part.kind in (ROTARY, ATTENTION)])
        self._of_steps = list(zip(placed, placed, strict=True))

    def _add_layer(self, layer: LayerOperators, delta: Tensor | None, *, is_last: bool) -> Tensor:
        """Its parts; what it leaves to be added to x."""
        of = self._buffers
        self._add(NORM, layer.before_attention.bind, of.x, delta, of.normed)
        self._add_linear(layer.qkv, of.normed, of.qkv)
        weights = (
            None if weight is None else weight.data_ptr()
            for weight in (layer.q_weight, layer.k_weight)
        )
        q_weight, k_weight = weights
        self._parts.append(library.Part(kind=ROTARY, q_weight=q_weight, k_weight=k_weight))
        self._parts.append(library.Part(kind=ATTENTION))
        if is_last:
            return of.delta
        self._add_linear(layer.out, of.attended, of.delta)
        after = self._add_after(layer.after_attention)
        self._add(NORM, layer.before_mlp.bind, of.x, after, of.normed)
        self._add_linear(layer.gate_up, of.normed, of.both)
        self._add(GATE, layer.activation.bind, of.both, of.gated)
        self._add_linear(layer.down, of.gated, of.delta)
        return self._add_after(layer.after_mlp)

    def _add_after(self, norm: RmsNorm | None) -> Tensor:
        """The norm of a delta, where a model has one."""
        of = self._buffers
        if norm is None:
            return of.delta
        self._add(NORM, norm.bind, of.delta, None, of.delta_normed)
        return of.delta_normed

    def _add_linear(self, linear: NativeLinear, x: Tensor, out: Tensor) -> None:
        kind = LINEAR if isinstance(linear, PackedLinear) else QUANTIZED
        self._add(kind, linear.bind, x, out)

    def _add(self, kind: int, bind: Callable[..., Any], *tensors: Tensor | None) -> None:
        """A part with a call of its own: another use of the operator would change its."""
        bound = bind(*tensors)
        call = type(bound).from_buffer_copy(bound)
        self._calls.append(call)
        self._parts.append(library.Part(kind=kind, call=ctypes.addressof(call)))
