"""Triton kernel that rotates queries and keys and puts keys and values into their slots.

Torch twin: kernels.reference.rotary_store. With x, y the first and second `half` of a head, and
what comes after them left as it is:

    x' = x c - y s,  y' = y c + x s      c, s = cosine[pos(t)], sine[pos(t)]

A program does some query heads of a token, or some KV heads, and has read all of them before it
writes one: queries are rotated in place.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check_rotary, check_runs_triton, interpreted
from kernels.rounding import rounded
from kernels.tiles import rotary_heads


@triton.jit
def _scaled(x, weight, dim, inside, factor, OFFSET: tl.constexpr, TYPE: tl.constexpr, BY_HAND):
    """A part of normed heads, weighted: x [H, P] at the head's elements dim [P]."""
    scale = tl.load(weight + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = x * factor
    y = y * (1.0 + scale) if OFFSET else rounded(y, TYPE, BY_HAND) * scale
    return rounded(y, TYPE, BY_HAND)


# fmt: off
@triton.jit
def _rotate(
    target, target_place,  # where [H] heads go
    source, weight, epsilon, cos, sin,  # source [H] heads; cos, sin [HALF_PAD]
    valid,  # [H]
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, BY_HAND: tl.constexpr,
):
    # fmt: on
    TYPE: tl.constexpr = target.dtype.element_ty
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    dim = tl.arange(0, HALF_PAD)
    inside = dim < HALF
    mask = valid[:, None] & inside[None, :]
    x = tl.load(source[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source[:, None] + HALF + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    rest_dim = 2 * HALF + tl.arange(0, REST_PAD)
    rest_inside = rest_dim < HEAD_DIM
    rest_mask = valid[:, None] & rest_inside[None, :]
    rest = x
    if REST > 0:
        rest = tl.load(source[:, None] + rest_dim[None, :], mask=rest_mask, other=0.0)
        rest = rest.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(x * x, 1) + tl.sum(y * y, 1)
        if REST > 0:
            squares = squares + tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + epsilon)[:, None]
        x = _scaled(x, weight, dim, inside, factor, OFFSET, TYPE, BY_HAND)
        y = _scaled(y, weight, HALF + dim, inside, factor, OFFSET, TYPE, BY_HAND)
        if REST > 0:
            rest = _scaled(rest, weight, rest_dim, rest_inside, factor, OFFSET, TYPE, BY_HAND)
    c, s = cos[None, :], sin[None, :]
    xc, ys = rounded(x * c, TYPE, BY_HAND), rounded(y * s, TYPE, BY_HAND)
    yc, xs = rounded(y * c, TYPE, BY_HAND), rounded(x * s, TYPE, BY_HAND)
    left, right = rounded(xc - ys, TYPE, BY_HAND), rounded(yc + xs, TYPE, BY_HAND)
    tl.debug_barrier()  # all threads have loaded before one stores in place
    place = target + target_place[:, None]
    tl.store(place + dim[None, :], left.to(TYPE), mask=mask)
    tl.store(place + HALF + dim[None, :], right.to(TYPE), mask=mask)
    if REST > 0:
        tl.store(place + rest_dim[None, :], rest.to(TYPE), mask=rest_mask)


# fmt: off
@triton.jit
def rotary_store_kernel(
    qkv,  # [T, (Hq + 2 Hkv) D]
    k_cache, v_cache,  # [N, Hkv, bs, D]
    slot_mapping, positions,  # [T] int64
    cosine, sine,  # [positions, HALF] fp32
    q_weight, k_weight,  # [D] or None
    epsilon,
    qkv_stride, stride_block, stride_head, stride_slot,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr,
    NORM_Q: tl.constexpr, NORM_K: tl.constexpr, OFFSET: tl.constexpr, BY_HAND: tl.constexpr,
):
    # fmt: on
    """Grid: (T, tiles of query heads, then tiles of KV heads)."""
    Q_TILES: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = qkv + token * qkv_stride
    TYPE: tl.constexpr = qkv.dtype.element_ty
    part = tl.arange(0, HALF_PAD)
    angle = tl.load(positions + token) * HALF + part
    cos = rounded(tl.load(cosine + angle, mask=part < HALF, other=0.0), TYPE, BY_HAND)
    sin = rounded(tl.load(sine + angle, mask=part < HALF, other=0.0), TYPE, BY_HAND)
    if tile < Q_TILES:
        head = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        _rotate(
            row, head * HEAD_DIM, row + head * HEAD_DIM, q_weight, epsilon, cos, sin,
            head < NUM_HEADS, HEAD_DIM, HALF, HALF_PAD, REST_PAD, NORM_Q, OFFSET, BY_HAND,
        )
        return
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head = (tile - Q_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
    valid = head < NUM_KV_HEADS
    block = slot // BLOCK_SIZE
    place = block * stride_block + head * stride_head + (slot % BLOCK_SIZE) * stride_slot
    keys = row + (NUM_HEADS + head) * HEAD_DIM
    _rotate(
        k_cache, place, keys, k_weight, epsilon, cos, sin,
        valid, HEAD_DIM, HALF, HALF_PAD, REST_PAD, NORM_K, OFFSET, BY_HAND,
    )
    dim = tl.arange(0, D_PAD)
    mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
    values = tl.load(
        row + ((NUM_HEADS + NUM_KV_HEADS + head) * HEAD_DIM)[:, None] + dim[None, :], mask=mask
    )
    tl.store(v_cache + place[:, None] + dim[None, :], values, mask=mask)


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
    """Rotates the queries of qkv [T, (Hq + 2 Hkv) D] in place; keys and values go to their slots.

    Returns the queries, a view [T, Hq, D]. Positions must be in the tables; they are not looked at.
    """
    check_rotary(qkv, k_cache, v_cache, slot_mapping, positions, cosine, sine, q_weight, k_weight)
    check_runs_triton(qkv.device, rotary_store_kernel)
    num_kv_heads, head_dim, half = k_cache.shape[1], k_cache.shape[3], cosine.shape[1]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    queries = qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    if qkv.shape[0] == 0:
        return queries
    block_h = rotary_heads(head_dim)
    tiles = triton.cdiv(num_heads, block_h) + triton.cdiv(num_kv_heads, block_h)
    rotary_store_kernel[(qkv.shape[0], tiles)](
        qkv,
        k_cache,
        v_cache,
        slot_mapping,
        positions,
        cosine,
        sine,
        q_weight,
        k_weight,
        epsilon,
        qkv.stride(0),
        *k_cache.stride()[:3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HALF_PAD=triton.next_power_of_2(half),
        REST_PAD=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        D_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=k_cache.shape[2],
        BLOCK_H=block_h,
        NORM_Q=q_weight is not None,
        NORM_K=k_weight is not None,
        OFFSET=offset,
        BY_HAND=interpreted(rotary_store_kernel),
        num_warps=4,
    )
    return queries
