"""Triton kernel that writes new keys and values into their slots of the paged cache.

Torch twin: kernels.reference.store_kv. One program writes one token's heads:

    cache[slot // block_size, h, slot % block_size] = new[t, h]      for slot = slot_mapping[t] >= 0
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check_runs_triton, check_store

MAX_BLOCK_E = 2048


@triton.jit
def kv_store_kernel(
    k,  # [T, Hkv, D]
    v,  # [T, Hkv, D]
    k_cache,  # [N, Hkv, bs, D]
    v_cache,
    slot_mapping,  # [T] int64
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    stride_block,
    stride_head,
    stride_slot,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    element = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    head, dim = element // HEAD_DIM, element % HEAD_DIM
    valid = element < NUM_KV_HEADS * HEAD_DIM
    block = slot // BLOCK_SIZE
    place = block * stride_block + head * stride_head + (slot % BLOCK_SIZE) * stride_slot + dim
    key = tl.load(k + token * k_stride_token + head * k_stride_head + dim, mask=valid)
    value = tl.load(v + token * v_stride_token + head * v_stride_head + dim, mask=valid)
    tl.store(k_cache + place, key, mask=valid)
    tl.store(v_cache + place, value, mask=valid)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes k and v [T, Hkv, D] into their slots of the cache; slot -1 is skipped."""
    check_store(k, v, k_cache, v_cache, slot_mapping)
    check_runs_triton(k.device, kv_store_kernel)
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    block_e = min(triton.next_power_of_2(num_kv_heads * head_dim), MAX_BLOCK_E)
    grid = (num_tokens, triton.cdiv(num_kv_heads * head_dim, block_e))
    kv_store_kernel[grid](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *k_cache.stride()[:3],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[2],
        BLOCK_E=block_e,
        num_warps=4,
    )
