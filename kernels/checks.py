"""Refuses wrong shapes, dtypes and devices before a kernel is launched: always a ValueError.

Checks read shapes and dtypes only, never the tensors' values: on a GPU that would wait for it.
"""

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 4, 128
MAX_HEAD_DIM = 256
MAX_ROW_WIDTH = 32_768  # elements that one Triton program holds at once


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


def check_max_seq_len(max_seq_len: int, block_tables: Tensor, block_size: int) -> None:
    """Of Triton's paged_attention, which does not see how long rows are: a longer row would be
    walked past the end of its table.
    """
    held = block_tables.shape[1] * block_size
    _need(
        0 <= max_seq_len <= held,
        f"max_seq_len must be at most {held}, what a row's block table holds, got",
        max_seq_len,
    )


def check_native(x: Tensor) -> None:
    """Of every native call."""
    _need(x.device.type == "cpu", "native kernels take CPU tensors, got", x.device)
    _need(x.dtype in NATIVE_DTYPES, "native kernels take fp32 and bf16, got", x.dtype)


def check_norm(x: Tensor, weight: Tensor, delta: Tensor | None) -> None:
    """Of rms_norm."""
    _need(
        x.dim() == 2 and x.stride(1) == 1, "x must be [tokens, dim] with dense rows, got", x.shape
    )
    _need(
        weight.shape == x.shape[1:] and weight.is_contiguous(),
        "weight must be [dim], got",
        weight.shape,
        x.shape,
    )
    _need(weight.dtype == x.dtype, "x and weight must have one dtype, got", x.dtype, weight.dtype)
    _check_devices(x, weight=weight)
    if delta is None:
        return
    _need(
        delta.shape == x.shape and delta.stride(1) == 1,
        "delta must have x's shape and dense rows, got",
        delta.shape,
        x.shape,
    )
    _need(delta.dtype == x.dtype, "x and delta must have one dtype, got", x.dtype, delta.dtype)
    _check_devices(x, delta=delta)


def check_gate(both: Tensor) -> None:
    """Of gated_activation."""
    _need(
        both.dim() == 2 and both.shape[1] % 2 == 0 and both.stride(1) == 1,
        "both must be [tokens, 2 * dim] with dense rows, got",
        both.shape,
    )


def check_rotary(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cosine: Tensor,
    sine: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
) -> None:
    """Of rotary_store."""
    _check_cache(k_cache, v_cache)
    num_kv_heads, dim = k_cache.shape[1], k_cache.shape[3]
    _need(
        qkv.dim() == 2 and qkv.shape[1] % dim == 0 and qkv.shape[1] > 2 * num_kv_heads * dim,
        "qkv must be [tokens, (query heads + 2 kv heads) * head dim], got",
        qkv.shape,
        k_cache.shape,
    )
    _need(qkv.stride(1) == 1, "qkv must be contiguous in its last dimension")
    _need(
        qkv.dtype == k_cache.dtype,
        "qkv and the cache must have one dtype, got",
        qkv.dtype,
        k_cache.dtype,
    )
    for name, numbers in (("slot_mapping", slot_mapping), ("positions", positions)):
        _need(
            numbers.shape == qkv.shape[:1] and numbers.is_contiguous(),
            f"{name} must have one entry a token, got",
            numbers.shape,
            qkv.shape,
        )
        _need(numbers.dtype == torch.int64, f"{name} must be int64, got", numbers.dtype)
    _need(
        cosine.dim() == 2 and cosine.shape == sine.shape and 2 * cosine.shape[1] <= dim,
        "cosine and sine must be [positions, half] of at most half the head dim, got",
        cosine.shape,
        sine.shape,
    )
    for name, table in (("cosine", cosine), ("sine", sine)):
        _need(
            table.dtype == torch.float32 and table.is_contiguous(),
            f"{name} must be contiguous and fp32, got",
            table.dtype,
        )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            _need(
                weight.shape == (dim,) and weight.is_contiguous() and weight.dtype == qkv.dtype,
                f"{name} must be [head dim] of qkv's dtype, got",
                weight.shape,
                weight.dtype,
            )
            _check_devices(qkv, **{name: weight})
    others = {"slot_mapping": slot_mapping, "positions": positions, "cosine": cosine, "sine": sine}
    _check_devices(qkv, k_cache=k_cache, v_cache=v_cache, **others)


def check_float(x: Tensor) -> None:
    """Of every Triton call that computes."""
    _need(x.dtype in FLOAT_DTYPES, "x must be fp32, bf16 or fp16, got", x.dtype)


def check_triton_width(width: int) -> None:
    """Of a row that one program holds."""
    _need(1 <= width <= MAX_ROW_WIDTH, f"a row must have 1 to {MAX_ROW_WIDTH} elements, got", width)


def check_linear(weight: Tensor, bias: Tensor | None) -> None:
    """Of the weights of a packed linear layer."""
    _need(
        weight.dim() == 2 and min(weight.shape) > 0,
        "weight must be [columns, depth], got",
        weight.shape,
    )
    if bias is not None:
        _need(bias.shape == weight.shape[:1], "bias must be [columns], got", bias.shape)
        _need(bias.is_floating_point(), "bias must be floating point, got", bias.dtype)
        _check_devices(weight, bias=bias)


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
