"""The native kernels as functions of tensors, with the signatures of their twins in reference.

Each refuses wrong shapes, dtypes and devices with a ValueError before anything is computed, and
block numbers, slots and positions that point outside as well: those are looked at in C++, before
the first is used. A caller that makes many calls of one kind prepares them once: see Attention.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.checks import (
    check_attention,
    check_gate,
    check_native,
    check_norm,
    check_rotary,
    check_store,
)
from kernels.native import library

REFUSALS = {
    1: "row {row}: seq_lens and query_start_loc do not fit each other and q",
    2: "row {row}: its block table is too short for its tokens",
    3: "row {row}: a block is outside the cache",
}


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes k and v [T, Hkv, D] into their slots of the cache; slot -1 is skipped."""
    check_store(k, v, k_cache, v_cache, slot_mapping)
    check_native(k)
    _need_dense(slot_mapping, "slot_mapping")
    refused = library.load().store_kv(
        k.data_ptr(),
        v.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slot_mapping.data_ptr(),
        *k.shape,
        k.element_size(),
        k_cache.shape[0] * k_cache.shape[2],
        k_cache.shape[2],
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
    )
    if refused:
        raise ValueError(f"slot_mapping: the slot of token {refused - 1} is outside the cache")


def refusal_of_attention(refused: int) -> str:
    """What the kernel's answer means."""
    return REFUSALS[refused % 4].format(row=refused // 4)


def refusal_of_rotary_store(refused: int) -> str:
    """What the kernel's answer means."""
    return f"token {refused - 1}: its slot or its position is outside"


class Attention:
    """paged_attention over the tables of one step, for all layers of one kind.

    Tables are checked when it is made, q and caches at each call; it keeps the tables alive.
    """

    def __init__(
        self,
        k_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        self._sinks = None if sinks is None else sinks.float()
        self._tables = (block_tables, seq_lens, query_start_loc)
        self._shape, self._stride = k_cache.shape, k_cache.stride()
        self._checks: Any = {"window": window, "softcap": softcap, "sinks": sinks}
        self._checked: tuple[Any, ...] = ()
        self._function = library.load().attention
        self._call = library.AttentionCall(
            tables=block_tables.data_ptr(),
            lens=seq_lens.data_ptr(),
            starts=query_start_loc.data_ptr(),
            sinks=None if self._sinks is None else self._sinks.data_ptr(),
            num_rows=block_tables.shape[0],
            num_blocks=k_cache.shape[0],
            num_kv_heads=k_cache.shape[1],
            block_size=k_cache.shape[2],
            dim=k_cache.shape[3],
            table_stride=block_tables.stride(0),
            table_width=block_tables.shape[1],
            cache_block=k_cache.stride(0),
            cache_head=k_cache.stride(1),
            cache_slot=k_cache.stride(2),
            window=window,
            is_bf16=k_cache.dtype == torch.bfloat16,
            scale=scale,
            softcap=softcap,
        )

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Attention of q [T, Hq, D]; a fresh tensor of that shape."""
        out = torch.empty(q.shape, dtype=q.dtype)
        refused = self._function(self.bind(q, k_cache, v_cache, out))
        if refused:
            raise ValueError(refusal_of_attention(refused))
        return out

    def bind(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor
    ) -> library.AttentionCall:
        """The call, checked, for `out` [T, Hq, D], which is dense; good until the next one."""
        call = self._call
        seen = (*_kind(q), k_cache.shape, k_cache.stride(), k_cache.dtype)
        if seen != self._checked:
            check_attention(q, k_cache, v_cache, *self._tables, **self._checks)
            check_native(q)
            if k_cache.shape != self._shape or k_cache.stride() != self._stride:
                raise ValueError("the cache must have the shape and the strides prepared for")
            self._checked = seen
            call.num_tokens, call.num_heads = q.shape[:2]
            call.q_token, call.q_head = q.stride()[:2]
            call.out_token, call.out_head = q.shape[1] * q.shape[2], q.shape[2]
        call.out, call.q = out.data_ptr(), q.data_ptr()
        call.k_cache, call.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
        return call


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    max_query_len: int,
    max_seq_len: int,
) -> Tensor:
    """Attention of q [T, Hq, D] over the cache; the rows' own tokens are stored already."""
    tables = (block_tables, seq_lens, query_start_loc)
    check_attention(q, k_cache, v_cache, *tables, window=window, softcap=softcap, sinks=sinks)
    attend = Attention(k_cache, *tables, scale=scale, window=window, softcap=softcap, sinks=sinks)
    return attend(q, k_cache, v_cache)


class RmsNorm:
    """rms_norm with the weight of one module."""

    def __init__(self, weight: Tensor, epsilon: float, *, offset: bool = False) -> None:
        self.weight = weight
        self._call = library.NormCall(
            weight=weight.data_ptr(),
            epsilon=epsilon,
            offset=offset,
            is_bf16=weight.dtype == torch.bfloat16,
        )
        self._function = library.load().norm
        self._checked: tuple[Any, ...] = ()

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """See rms_norm."""
        out = torch.empty(x.shape, dtype=x.dtype)
        self._function(self.bind(x, delta, out))
        return out

    def bind(self, x: Tensor, delta: Tensor | None, out: Tensor) -> library.NormCall:
        """The call, checked, for `out` [T, D], which is dense; good until the next one."""
        seen = _kind(x) if delta is None else (*_kind(x), *_kind(delta))
        if seen != self._checked:
            check_norm(x, self.weight, delta)
            check_native(x)
            self._checked = seen
        call = self._call
        call.rows, call.dim = x.shape
        call.out, call.x, call.out_row, call.x_row = (
            out.data_ptr(),
            x.data_ptr(),
            call.dim,
            x.stride(0),
        )
        call.delta = None if delta is None else delta.data_ptr()
        call.delta_row = 0 if delta is None else delta.stride(0)
        return call


def rms_norm(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    *,
    delta: Tensor | None = None,
    offset: bool = False,
) -> Tensor:
    """Norm of the rows of x [T, D]; delta, where given, is added to x in place first."""
    return RmsNorm(weight, epsilon, offset=offset)(x, delta)


class GatedActivation:
    """gated_activation of one kind."""

    def __init__(self, *, gelu: bool = False) -> None:
        self._call = library.GateCall(gelu=gelu)
        self._function = library.load().gate
        self._checked: tuple[Any, ...] = ()

    def __call__(self, both: Tensor) -> Tensor:
        """See gated_activation."""
        out = torch.empty((*both.shape[:-1], both.shape[-1] // 2), dtype=both.dtype)
        self._function(self.bind(both, out))
        return out

    def bind(self, both: Tensor, out: Tensor) -> library.GateCall:
        """The call, checked, for `out` [T, D], which is dense; good until the next one."""
        seen = _kind(both)
        if seen != self._checked:
            check_gate(both)
            check_native(both)
            self._checked = seen
        call = self._call
        call.rows, call.dim = both.shape[0], both.shape[1] // 2
        call.out, call.both = out.data_ptr(), both.data_ptr()
        call.out_row, call.both_row = call.dim, both.stride(0)
        call.is_bf16 = both.dtype == torch.bfloat16
        return call


def gated_activation(both: Tensor, *, gelu: bool = False) -> Tensor:
    """act(both[:, :D]) * both[:, D:] for both [T, 2 D]; act is silu, or gelu in its tanh form."""
    return GatedActivation(gelu=gelu)(both)


class RotaryStore:
    """rotary_store for the tokens of one step, for all layers with one rotary embedding."""

    def __init__(
        self,
        k_cache: Tensor,
        slot_mapping: Tensor,
        positions: Tensor,
        cosine: Tensor,
        sine: Tensor,
        *,
        epsilon: float = 0.0,
        offset: bool = False,
    ) -> None:
        self._step = (slot_mapping, positions, cosine, sine)
        self._checked: tuple[Any, ...] = ()
        self._function = library.load().rotary_store
        num_blocks, num_kv_heads, block_size, dim = k_cache.shape
        self._call = library.RotaryCall(
            slots=slot_mapping.data_ptr(),
            positions=positions.data_ptr(),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            num_tokens=slot_mapping.shape[0],
            num_kv_heads=num_kv_heads,
            dim=dim,
            half=cosine.shape[1],
            num_positions=cosine.shape[0],
            num_slots=num_blocks * block_size,
            block_size=block_size,
            is_bf16=k_cache.dtype == torch.bfloat16,
            offset=offset,
            epsilon=epsilon,
        )

    def __call__(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
    ) -> Tensor:
        """Rotates the queries of qkv in place; a view of them [T, Hq, D]."""
        call = self.bind(qkv, k_cache, v_cache, q_weight, k_weight)
        refused = self._function(call)
        if refused:
            raise ValueError(refusal_of_rotary_store(refused))
        return self.queries(qkv)

    def queries(self, qkv: Tensor) -> Tensor:
        """The view of them [T, Hq, D], once qkv was bound."""
        call = self._call
        return qkv.as_strided((qkv.shape[0], call.num_heads, call.dim), (call.token, call.dim, 1))

    def bind(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
    ) -> library.RotaryCall:
        """The call, checked; good until the next one."""
        call = self._call
        seen = (*_kind(qkv), k_cache.shape, k_cache.stride(), k_cache.dtype)
        if seen != self._checked or q_weight is not None:
            check_rotary(qkv, k_cache, v_cache, *self._step, q_weight, k_weight)
            check_native(qkv)
            call.num_heads = qkv.shape[1] // call.dim - 2 * call.num_kv_heads
            call.token = qkv.stride(0)
            call.cache_block, call.cache_head, call.cache_slot = k_cache.stride()[:3]
            self._checked = seen
        call.qkv = qkv.data_ptr()
        call.k_cache, call.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
        call.q_weight = None if q_weight is None else q_weight.data_ptr()
        call.k_weight = None if k_weight is None else k_weight.data_ptr()
        return call


def rotary_store(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cosine: Tensor,
    sine: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    epsilon: float = 0.0,
    offset: bool = False,
) -> Tensor:
    """See kernels.reference.rotary_store."""
    check_rotary(qkv, k_cache, v_cache, slot_mapping, positions, cosine, sine, q_weight, k_weight)
    operator = RotaryStore(
        k_cache, slot_mapping, positions, cosine, sine, epsilon=epsilon, offset=offset
    )
    return operator(qkv, k_cache, v_cache, q_weight, k_weight)


def _kind(x: Tensor) -> tuple[Any, ...]:
    """What the checks of a tensor look at."""
    return (x.shape, x.stride(), x.dtype, x.device)


def _need_dense(tensor: Tensor, name: str) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
