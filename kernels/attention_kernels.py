"""Triton kernels of paged attention; kernels.paged_attention chooses between them and launches.

prefill_kernel walks all keys of a tile of queries, decode_kernel one split of one row's keys,
reduce_kernel joins a row's splits. Scores, weights' sums and weighted values are fp32, exponents
base 2. Places in the cache are int64.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _row_of(query_start_loc, query_block, num_rows, BLOCK_Q: tl.constexpr):
    """The row of a query block: block start[r] // BLOCK_Q + r is row r's first."""
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= query_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _attend_keys(
    query,  # [M, D_PAD]
    query_pos,  # [M]
    top,  # [M] greatest score so far, base 2
    total,  # [M] sum of weights, relative to top
    acc,  # [M, D_PAD]
    k_head,  # the KV head's first element of block 0
    v_head,
    table,  # the row's block table
    first_key,
    begin_key,  # with a window: keys before it are not read
    end_key,  # keys from here on are not read
    window,
    scale,
    softcap,
    stride_block,
    stride_slot,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """One turn: keys first_key .. first_key + BLOCK_N."""
    key_pos = first_key + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, D_PAD)
    valid = key_pos < end_key
    if HAS_WINDOW:
        valid = valid & (key_pos >= begin_key)
    block = tl.load(table + key_pos // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
    place = block * stride_block + (key_pos % BLOCK_SIZE) * stride_slot  # [N]
    k_mask, v_mask = valid[None, :], valid[:, None]
    if HEAD_DIM != D_PAD:
        k_mask = k_mask & (dim < HEAD_DIM)[:, None]
        v_mask = v_mask & (dim < HEAD_DIM)[None, :]
    keys = tl.load(k_head + place[None, :] + dim[:, None], mask=k_mask, other=0.0)  # [D_PAD, N]
    values = tl.load(v_head + place[:, None] + dim[None, :], mask=v_mask, other=0.0)  # [N, D_PAD]

    if DOT_FP32:
        query, keys, values = query.to(tl.float32), keys.to(tl.float32), values.to(tl.float32)
    scores = tl.dot(query, keys, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        # tanh(|x|) = (1 - t) / (1 + t), t = exp(-2 |x|), which can't overflow
        shrunk = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / softcap))
        capped = softcap * (1.0 - shrunk) / (1.0 + shrunk)
        scores = tl.where(scores < 0.0, -capped, capped)
    scores = scores * LOG2_E
    attended = (key_pos[None, :] <= query_pos[:, None]) & valid[None, :]
    if HAS_WINDOW:
        attended = attended & (key_pos[None, :] > query_pos[:, None] - window)
    scores = tl.where(attended, scores, float("-inf"))

    new_top = tl.maximum(top, tl.max(scores, 1))
    # A query that has seen no key yet keeps top = -inf; shift it by 0 instead of -inf - -inf.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return new_top, total, acc


# fmt: off
@triton.jit(do_not_specialize=["num_rows", "table_stride", "window"])
def prefill_kernel(
    out, q,  # [T, Hq, D]
    k_cache, v_cache,  # [N, Hkv, bs, D]
    block_tables,  # [R, max_blocks] int32
    seq_lens,  # [R] int32
    query_start_loc,  # [R + 1] int32
    sinks,  # [Hq] or None
    num_rows, table_stride, window, scale, softcap,
    out_stride_token, out_stride_head, q_stride_token, q_stride_head,
    stride_block, stride_head, stride_slot,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT_FP32: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):
    # fmt: on
    """Grid: (query blocks, Hkv). Rows with fewer than two query tokens are left alone."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    query_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = _row_of(query_start_loc, query_block, num_rows, BLOCK_Q)
    query_start = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - query_start
    first_query = (query_block - query_start // BLOCK_Q - row) * BLOCK_Q
    if (query_len < 2) | (first_query >= query_len):
        return
    seq_len = tl.load(seq_lens + row)

    # Row m of the tile is query token m // GROUP, head m % GROUP of the KV head's group.
    member = tl.arange(0, BLOCK_M)
    query_index = first_query + member // GROUP
    head = kv_head * GROUP + member % GROUP
    dim = tl.arange(0, D_PAD)
    valid = (query_index < query_len) & (member < BLOCK_Q * GROUP)
    q_mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
    token = (query_start + query_index).to(tl.int64)
    query = tl.load(
        q + (token * q_stride_token + head * q_stride_head)[:, None] + dim[None, :],
        mask=q_mask, other=0.0,
    )  # [M, D_PAD]

    first_pos = seq_len - query_len + first_query
    end_key = tl.minimum(first_pos + BLOCK_Q, seq_len)
    begin_key = 0
    if HAS_WINDOW:
        begin_key = tl.maximum(first_pos - window + 1, 0)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    table = block_tables + row.to(tl.int64) * table_stride
    # From a multiple of BLOCK_N: turns stand at the same keys whatever the chunk.
    for key in range(begin_key // BLOCK_N * BLOCK_N, end_key, BLOCK_N):
        top, total, acc = _attend_keys(
            query, seq_len - query_len + query_index, top, total, acc,
            k_cache + kv_head * stride_head, v_cache + kv_head * stride_head, table,
            key, begin_key, end_key, window, scale, softcap, stride_block, stride_slot,
            HEAD_DIM, D_PAD, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, DOT_FP32,
        )

    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        new_top = tl.maximum(top, sink)
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.exp2(sink - new_top)
        acc = acc * fade[:, None]
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + (token * out_stride_token + head * out_stride_head)[:, None] + dim[None, :],
        acc.to(out.dtype.element_ty), mask=q_mask,
    )


# fmt: off
@triton.jit(do_not_specialize=["first_row", "num_splits", "table_stride", "window"])
def decode_kernel(
    part_acc,  # [rows, Hq, num_splits, D] fp32
    part_top, part_total,  # [rows, Hq, num_splits] fp32
    q,  # [T, Hq, D]
    k_cache, v_cache,  # [N, Hkv, bs, D]
    block_tables,  # [R, max_blocks] int32
    seq_lens,  # [R] int32
    query_start_loc,  # [R + 1] int32
    first_row, num_splits, table_stride, window, scale, softcap,
    q_stride_token, q_stride_head,
    stride_block, stride_head, stride_slot,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    DOT_FP32: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):
    # fmt: on
    """Grid: (rows, Hkv, num_splits). Split 0 of a row is the first that its window reaches."""
    row = first_row + tl.program_id(0)
    kv_head = tl.program_id(1)
    query_start = tl.load(query_start_loc + row)
    if tl.load(query_start_loc + row + 1) - query_start != 1:
        return
    seq_len = tl.load(seq_lens + row)
    begin_key = 0
    if HAS_WINDOW:
        begin_key = tl.maximum(seq_len - window, 0)
    split = begin_key // SPLIT + tl.program_id(2)
    start = tl.maximum(begin_key // BLOCK_N * BLOCK_N, split * SPLIT)
    end_key = tl.minimum((split + 1) * SPLIT, seq_len)
    if start >= end_key:
        return

    member = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + member
    dim = tl.arange(0, D_PAD)
    valid = member < GROUP
    q_mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
    query = tl.load(
        q + query_start.to(tl.int64) * q_stride_token
        + (head * q_stride_head)[:, None] + dim[None, :],
        mask=q_mask, other=0.0,
    )  # [M, D_PAD]

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    query_pos = tl.zeros([BLOCK_M], tl.int32) + (seq_len - 1)
    table = block_tables + row.to(tl.int64) * table_stride
    for key in range(start, end_key, BLOCK_N):
        top, total, acc = _attend_keys(
            query, query_pos, top, total, acc,
            k_cache + kv_head * stride_head, v_cache + kv_head * stride_head, table,
            key, begin_key, end_key, window, scale, softcap, stride_block, stride_slot,
            HEAD_DIM, D_PAD, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, DOT_FP32,
        )

    num_heads = tl.num_programs(1) * GROUP
    part = (tl.program_id(0).to(tl.int64) * num_heads + head) * num_splits + tl.program_id(2)
    tl.store(part_top + part, top, mask=valid)
    tl.store(part_total + part, total, mask=valid)
    tl.store(part_acc + part[:, None] * HEAD_DIM + dim[None, :], acc, mask=q_mask)


# fmt: off
@triton.jit(do_not_specialize=["first_row", "num_splits", "window"])
def reduce_kernel(
    out,  # [T, Hq, D]
    part_acc, part_top, part_total,  # as decode_kernel leaves them
    seq_lens, query_start_loc,
    sinks,  # [Hq] or None
    first_row, num_splits, window,
    out_stride_token, out_stride_head,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, SPLIT: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):
    # fmt: on
    """Grid: (rows, Hq). A row with seq_len 0 gets zeros."""
    row = first_row + tl.program_id(0)
    head = tl.program_id(1)
    query_start = tl.load(query_start_loc + row)
    if tl.load(query_start_loc + row + 1) - query_start != 1:
        return
    seq_len = tl.load(seq_lens + row)
    first_split = 0
    if HAS_WINDOW:
        first_split = tl.maximum(seq_len - window, 0) // SPLIT
    row_splits = (seq_len + SPLIT - 1) // SPLIT - first_split

    dim = tl.arange(0, D_PAD)
    top = float("-inf")
    total = 0.0
    if HAS_SINKS:
        top = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = 1.0
    acc = tl.zeros([D_PAD], tl.float32)
    first_part = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * num_splits
    for first in range(0, row_splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        valid = split < row_splits
        split_top = tl.load(part_top + first_part + split, mask=valid, other=float("-inf"))
        split_total = tl.load(part_total + first_part + split, mask=valid, other=0.0)
        split_acc = tl.load(
            part_acc + (first_part + split)[:, None] * HEAD_DIM + dim[None, :],
            mask=valid[:, None] & (dim < HEAD_DIM)[None, :], other=0.0,
        )  # [S, D_PAD]
        new_top = tl.maximum(top, tl.max(split_top, 0))  # finite: each split has a key
        weight = tl.exp2(split_top - new_top)
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(split_total * weight, 0)
        acc = acc * fade + tl.sum(split_acc * weight[:, None], 0)
        top = new_top
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + query_start.to(tl.int64) * out_stride_token + head * out_stride_head + dim,
        acc.to(out.dtype.element_ty), mask=dim < HEAD_DIM,
    )
