"""Triton attention over the paged cache, for rows of any length mix in one call.

Torch twin and formula: kernels.reference.paged_attention. The tokens' own keys and values are in
the cache already, so a prefill chunk and its paged prefix are one walk over blocks.

Two paths, chosen per row on the device, so that a step needs no host wait:

    query_len > 1   prefill_kernel: a tile holds block_m // G query tokens x G query heads of one
                    KV head, so that tl.dot is full; it walks its keys in turns of block_n.
    query_len == 1  decode_kernel: the row's keys are cut at multiples of a fixed split; each split
                    leaves (max, sum, weighted values) in scratch, reduce_kernel joins them.

Which path, where keys are cut and in which order sums are joined depend on the row and on how many
of its tokens are queries, never on other rows. The paths sum in different orders: the last bits of
a token that is its row's only query differ from those that it has in a longer chunk
(docs/architecture.md has what follows from that). Places past a row's end are never read, nor
places that no query of a tile's window reaches.

Under TRITON_INTERPRET=1, set before triton is first imported, the same code runs on CPU tensors.
"""

import torch
import triton
from torch import Tensor

from kernels.attention_kernels import decode_kernel, prefill_kernel, reduce_kernel
from kernels.checks import check_attention, check_max_seq_len, check_runs_triton, interpreted
from kernels.tiles import INTERPRETER_TILES, Tiles, architecture, tiles_for

MAX_SCRATCH_BYTES = 256 << 20  # of one decode launch; more rows are done in several launches
REDUCE_BLOCK = 16  # splits that reduce_kernel joins in one turn


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
    tiles: Tiles | None = None,
) -> Tensor:
    """Attention of q [T, Hq, D] over the cache; the rows' own tokens are stored already.

    max_query_len and max_seq_len are at least the rows' greatest. Tokens of q that belong to no
    row give zeros.
    """
    check_attention(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    check_runs_triton(q.device, decode_kernel)
    check_max_seq_len(max_seq_len, block_tables, k_cache.shape[2])
    if max_query_len < 1:
        raise ValueError(f"max_query_len must be at least 1, got {max_query_len}")
    out_dtype = torch.float32 if _dots_in_fp32(q) else q.dtype
    out = torch.zeros(q.shape, dtype=out_dtype, device=q.device)
    if q.shape[0] == 0 or seq_lens.shape[0] == 0 or max_seq_len == 0:
        return out.to(q.dtype)
    if tiles is None:
        tiles = _tiles_of(q, q.shape[1] // k_cache.shape[1])
    inputs = (q, k_cache, v_cache, block_tables, seq_lens, query_start_loc)
    if max_query_len > 1:
        _prefill(out, *inputs, scale, window, softcap, sinks, tiles)
    _decode(out, *inputs, scale, window, softcap, sinks, max_seq_len, tiles)
    return out.to(q.dtype)


def _dots_in_fp32(q: Tensor) -> bool:
    """Triton 3.7's interpreter multiplies bf16 as integers and cuts instead of rounding to it."""
    return interpreted(decode_kernel) and q.dtype == torch.bfloat16


def _tiles_of(q: Tensor, group: int) -> Tiles:
    if interpreted(decode_kernel):
        return INTERPRETER_TILES
    arch = architecture(torch.cuda.get_device_capability(q.device))
    return tiles_for(q.shape[2], q.dtype, arch, group)


def _prefill(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    tiles: Tiles,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_rows, num_kv_heads = seq_lens.shape[0], k_cache.shape[1]
    group = num_heads // num_kv_heads
    block_m = max(tiles.block_m, triton.next_power_of_2(group))
    # Enough whatever the rows' lengths are; see _row_of.
    grid = (num_tokens // (block_m // group) + num_rows, num_kv_heads)
    prefill_kernel[grid](
        out,
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        sinks,
        num_rows,
        block_tables.stride(0),
        window,
        scale,
        softcap,
        out.stride(0),
        out.stride(1),
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        GROUP=group,
        HEAD_DIM=head_dim,
        D_PAD=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=k_cache.shape[2],
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_n,
        DOT_FP32=_dots_in_fp32(q),
        HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap > 0.0,
        HAS_SINKS=sinks is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _decode(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    max_seq_len: int,
    tiles: Tiles,
) -> None:
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_rows, num_kv_heads = seq_lens.shape[0], k_cache.shape[1]
    group = num_heads // num_kv_heads
    num_splits = triton.cdiv(max_seq_len, tiles.split)
    if window:
        num_splits = min(num_splits, triton.cdiv(window - 1, tiles.split) + 1)
    row_bytes = num_heads * num_splits * (head_dim + 2) * 4
    rows_at_once = min(num_rows, max(1, MAX_SCRATCH_BYTES // row_bytes))
    shape = (rows_at_once, num_heads, num_splits)
    part_acc = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    part_top = torch.empty(shape, dtype=torch.float32, device=q.device)
    part_total = torch.empty(shape, dtype=torch.float32, device=q.device)
    d_pad = max(16, triton.next_power_of_2(head_dim))
    for first_row in range(0, num_rows, rows_at_once):
        rows = min(rows_at_once, num_rows - first_row)
        decode_kernel[(rows, num_kv_heads, num_splits)](
            part_acc,
            part_top,
            part_total,
            q,
            k_cache,
            v_cache,
            block_tables,
            seq_lens,
            query_start_loc,
            first_row,
            num_splits,
            block_tables.stride(0),
            window,
            scale,
            softcap,
            q.stride(0),
            q.stride(1),
            *k_cache.stride()[:3],
            GROUP=group,
            HEAD_DIM=head_dim,
            D_PAD=d_pad,
            BLOCK_SIZE=k_cache.shape[2],
            BLOCK_M=max(16, triton.next_power_of_2(group)),
            BLOCK_N=tiles.decode_block_n,
            SPLIT=tiles.split,
            DOT_FP32=_dots_in_fp32(q),
            HAS_WINDOW=window > 0,
            HAS_SOFTCAP=softcap > 0.0,
            num_warps=tiles.decode_num_warps,
            num_stages=tiles.decode_num_stages,
        )
        reduce_kernel[(rows, num_heads)](
            out,
            part_acc,
            part_top,
            part_total,
            seq_lens,
            query_start_loc,
            sinks,
            first_row,
            num_splits,
            window,
            out.stride(0),
            out.stride(1),
            HEAD_DIM=head_dim,
            D_PAD=d_pad,
            SPLIT=tiles.split,
            BLOCK_S=REDUCE_BLOCK,
            HAS_WINDOW=window > 0,
            HAS_SINKS=sinks is not None,
            num_warps=4,
        )
