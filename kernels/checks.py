"""Refuses wrong shapes, dtypes and devices before a kernel is launched: always a ValueError.

Checks read shapes and dtypes only, never the tensors' values: on a GPU that would wait for it.
"""

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 4, 128
MAX_HEAD_DIM = 256


def check_store(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Of store_kv."""
    _check_cache(k_cache, v_cache)
    _need(k.dim() == 3, "k must be [tokens, kv heads, head dim], got", k.shape)
    _need(k.shape == v.shape, "k and v must have one shape, got", k.shape, v.shape)
    _need(
        k.shape[1] == k_cache.shape[1] and k.shape[2] == k_cache.shape[3],
        "k's kv heads and head dim must be the cache's, got",
        k.shape,
        k_cache.shape,
    )
    _need(
        k.dtype == v.dtype == k_cache.dtype,
        "k, v and the cache must have one dtype, got",
        k.dtype,
        v.dtype,
        k_cache.dtype,
    )
    _need(
        slot_mapping.shape == k.shape[:1],
        "slot_mapping must have one entry a token, got",
        slot_mapping.shape,
        k.shape,
    )
    _need(slot_mapping.dtype == torch.int64, "slot_mapping must be int64, got", slot_mapping.dtype)
    _check_devices(k_cache, k=k, v=v, v_cache=v_cache, slot_mapping=slot_mapping)
    _need(
        k.stride(2) == 1 and v.stride(2) == 1, "k and v must be contiguous in their last dimension"
    )


def check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    """Of paged_attention."""
    _check_cache(k_cache, v_cache)
    _need(q.dim() == 3, "q must be [tokens, query heads, head dim], got", q.shape)
    num_heads, num_kv_heads = q.shape[1], k_cache.shape[1]
    _need(
        num_heads > 0 and num_heads % num_kv_heads == 0,
        "query heads must be a multiple of kv heads, got",
        num_heads,
        num_kv_heads,
    )
    _need(
        q.shape[2] == k_cache.shape[3],
        "q's head dim must be the cache's, got",
        q.shape,
        k_cache.shape,
    )
    _need(
        q.dtype == k_cache.dtype,
        "q and the cache must have one dtype, got",
        q.dtype,
        k_cache.dtype,
    )
    _need(q.stride(2) == 1, "q must be contiguous in its last dimension")
    _need(block_tables.dim() == 2, "block_tables must be [rows, blocks], got", block_tables.shape)
    rows = block_tables.shape[0]
    _need(seq_lens.shape == (rows,), "seq_lens must be [rows], got", seq_lens.shape, rows)
    _need(
        query_start_loc.shape == (rows + 1,),
        "query_start_loc must be [rows + 1], got",
        query_start_loc.shape,
        rows,
    )
    for name, tensor in (
        ("block_tables", block_tables),
        ("seq_lens", seq_lens),
        ("query_start_loc", query_start_loc),
    ):
        _need(tensor.dtype == torch.int32, f"{name} must be int32, got", tensor.dtype)
    _need(
        all(t.stride(-1) == 1 for t in (block_tables, seq_lens, query_start_loc)),
        "block_tables, seq_lens and query_start_loc must be contiguous in their last dimension",
    )
    _need(window >= 0, "window must not be negative, got", window)
    _need(softcap >= 0.0, "softcap must not be negative, got", softcap)
    if sinks is not None:
        _need(sinks.shape == (num_heads,), "sinks must be [query heads], got", sinks.shape)
        _need(sinks.is_floating_point(), "sinks must be floating point, got", sinks.dtype)
        _need(sinks.is_contiguous(), "sinks must be contiguous")
        _check_devices(q, sinks=sinks)
    _check_devices(
        q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
    )


def interpreted(kernel: object) -> bool:
    """True when a Triton kernel was made for the interpreter (TRITON_INTERPRET=1 at import)."""
    return type(kernel).__name__ == "InterpretedFunction"


def check_runs_triton(device: torch.device, kernel: object) -> None:
    """Of every Triton call: the device must be the kernel's."""
    if interpreted(kernel):
        _need(device.type == "cpu", "the interpreter takes CPU tensors, got", device)
    else:
        _need(device.type == "cuda", "Triton kernels take CUDA tensors, got", device)


def _check_cache(k_cache: Tensor, v_cache: Tensor) -> None:
    _need(
        k_cache.dim() == 4,
        "a cache must be [blocks, kv heads, block size, head dim], got",
        k_cache.shape,
    )
    _need(
        k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride(),
        "k_cache and v_cache must have one shape and one stride, got",
        k_cache.shape,
        v_cache.shape,
    )
    _need(
        k_cache.dtype == v_cache.dtype and k_cache.dtype in FLOAT_DTYPES,
        "caches must be fp32, bf16 or fp16 alike, got",
        k_cache.dtype,
        v_cache.dtype,
    )
    _need(
        MIN_BLOCK_SIZE <= k_cache.shape[2] <= MAX_BLOCK_SIZE,
        f"block size must be {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}, got",
        k_cache.shape[2],
    )
    _need(
        1 <= k_cache.shape[3] <= MAX_HEAD_DIM,
        f"head dim must be 1 to {MAX_HEAD_DIM}, got",
        k_cache.shape[3],
    )
    _need(k_cache.stride(3) == 1, "a cache must be contiguous in its last dimension")


def _check_devices(first: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        _need(
            tensor.device == first.device,
            f"{name} must be on {first.device}, got",
            tensor.device,
        )


def _need(condition: bool, message: str, *values: object) -> None:
    if not condition:
        shown = ", ".join(str(tuple(v) if isinstance(v, torch.Size) else v) for v in values)
        raise ValueError(f"{message} {shown}".rstrip())
