"""Torch twins of the kernels: same signatures, plain tensor operations, any device.

They are what the Triton kernels are held against, and the worker's `torch` back end. Blocks are
gathered into contiguous keys and values first; scores and softmax are fp32.

    out[t, h] = sum_j p[j] v[j, h // G],  p = softmax_j(cap(scale * q[t, h] . k[j, h // G]))

over the positions j of the row with pos(t) - window < j <= pos(t), where cap(x) is
softcap * tanh(x / softcap) or x, and a sink adds exp(sink[h]) to the softmax's sum and no value.

What depends on tables and lengths alone is an AttentionPlan: made once per step and window,
reused by every layer. Rows with one query token are attended in padded groups of like length
(padding at most 1 / GROUP_FILL, a group gathers at most MAX_GATHERED_TOKENS unless it is a single
row), the others one by one. Slots that no row has written are never read into a result, whatever
they hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.checks import (
    check_attention,
    check_gate,
    check_norm,
    check_rotary,
    check_store,
)

GROUP_FILL = 0.6  # the shortest row of a group has at least this share of the longest's blocks
# Small enough that what was gathered is still in the processor's cache when it is attended, and
# that its memory is used again instead of being asked for anew: half the time of 65,536.
MAX_GATHERED_TOKENS = 4_096


class Gather:
    """Blocks to gather from any layer's cache; their places are worked out for the first one."""

    __slots__ = ("_places", "_strides", "blocks")

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks
        self._strides: tuple[int, ...] = ()
        self._places = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def of(self, cache: Tensor) -> Tensor:
        """[N, Hkv, bs, D] -> a contiguous copy [Hkv, len(self) * bs, D].

        index_select of a strided view copies the whole cache first. So it is given the contiguous
        rows that the view is made of, one row per block and head, where the strides allow that.
        """
        num_blocks, num_heads, block_size, dim = cache.shape
        row = block_size * dim
        strides = cache.stride()
        if strides[2] != dim or strides[0] % row or strides[1] % row:
            return cache.transpose(0, 1)[:, self.blocks].flatten(1, 2)
        blocks_apart, heads_apart = strides[0] // row, strides[1] // row
        if self._strides != strides:
            heads = torch.arange(num_heads, device=cache.device) * heads_apart
            self._places = (heads[:, None] + self.blocks * blocks_apart).view(-1)
            self._strides = strides
        num_rows = (num_blocks - 1) * blocks_apart + (num_heads - 1) * heads_apart + 1
        rows = cache.as_strided((num_rows, row), (row, 1))
        return rows.index_select(0, self._places).view(num_heads, -1, dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Rows with one query token and about the same length, padded to num_blocks each."""

    tokens: Tensor  # [n] rows of q
    blocks: Gather  # n * num_blocks of them, padding repeats a row's first block
    mask: Tensor | None  # [1, n, 1, num_blocks * block_size] True where attended; None: all
    unwritten: Tensor | None  # gathered places (row * length + token) past the rows' ends


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRow:
    """A row with several query tokens."""

    start: int  # q[start:end]
    end: int
    blocks: Gather
    num_keys: int  # gathered tokens that count, from the first of `blocks` on
    mask: Tensor | None  # [end - start, num_keys]; None: plain causal from position 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Index tensors of one step for layers of one window."""

    window: int
    block_size: int
    num_tokens: int  # query tokens; later rows of q are padding and give zeros
    groups: tuple[DecodeGroup, ...]
    rows: tuple[PrefillRow, ...]


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes k and v [T, Hkv, D] into their slots of the cache; slot -1 is skipped."""
    check_store(k, v, k_cache, v_cache, slot_mapping)
    block_size = k_cache.shape[2]
    stored = slot_mapping >= 0
    if not bool(stored.all()):
        k, v, slot_mapping = k[stored], v[stored], slot_mapping[stored]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_size
    k_cache[blocks, :, offsets] = k
    v_cache[blocks, :, offsets] = v


def make_attention_plan(
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    block_size: int,
    window: int = 0,
) -> AttentionPlan:
    """Indices that every layer of this window shares in one step.

    Rows without query tokens, or with seq_len 0, are padding and are left out.
    """
    lens: list[int] = seq_lens.tolist()
    starts: list[int] = query_start_loc.tolist()
    device = block_tables.device
    tables = block_tables.cpu().long()
    decode: list[tuple[int, int, int]] = []  # (number of blocks, row, first block)
    rows: list[PrefillRow] = []
    for row, seq_len in enumerate(lens):
        query_len = starts[row + 1] - starts[row]
        if query_len <= 0 or seq_len <= 0:
            continue
        assert query_len <= seq_len, "a row has more query tokens than tokens"
        first_key = max(0, seq_len - query_len + 1 - window) if window else 0
        first_block, end_block = first_key // block_size, -(-seq_len // block_size)
        assert end_block <= tables.shape[1], "a block table is too short for its row"
        if query_len == 1:
            decode.append((end_block - first_block, row, first_block))
            continue
        keys_from = first_block * block_size
        rows.append(
            PrefillRow(
                start=starts[row],
                end=starts[row + 1],
                blocks=Gather(tables[row, first_block:end_block].to(device)),
                num_keys=seq_len - keys_from,
                mask=_prefill_mask(seq_len - query_len, seq_len, keys_from, window, device),
            )
        )
    groups = tuple(
        _decode_group(members, tables, lens, starts, block_size, window, device)
        for members in _split_by_length(decode, block_size)
    )
    return AttentionPlan(
        window=window,
        block_size=block_size,
        num_tokens=starts[-1],
        groups=groups,
        rows=tuple(rows),
    )


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
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Attention of q [T, Hq, D] over the cache; the rows' own tokens are stored already.

    A plan must come from the same tables and lengths; without one it is made here.
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
    if plan is None:
        plan = make_attention_plan(
            block_tables, seq_lens, query_start_loc, k_cache.shape[2], window
        )
    assert plan.window == window, "plan of a layer with another window"
    assert plan.block_size == k_cache.shape[2], "plan of a cache with another block size"
    out = torch.zeros_like(q) if plan.num_tokens < q.shape[0] else torch.empty_like(q)
    if not plan.groups and not plan.rows:
        return out.zero_()
    if _covered(plan) < plan.num_tokens:
        out.zero_()
    for group in plan.groups:
        _attend_group(out, q, k_cache, v_cache, group, scale, softcap, sinks)
    for row in plan.rows:
        _attend_row(out, q, k_cache, v_cache, row, scale, softcap, sinks)
    return out


def _covered(plan: AttentionPlan) -> int:
    return sum(len(g.tokens) for g in plan.groups) + sum(r.end - r.start for r in plan.rows)


def _split_by_length(
    decode: list[tuple[int, int, int]], block_size: int
) -> list[list[tuple[int, int, int]]]:
    """Longest first, a new group where padding or the gathered size would grow too far."""
    groups: list[list[tuple[int, int, int]]] = []
    for entry in sorted(decode, reverse=True):
        if groups:
            longest = groups[-1][0][0]
            gathered = (len(groups[-1]) + 1) * longest * block_size
            if entry[0] >= GROUP_FILL * longest and gathered <= MAX_GATHERED_TOKENS:
                groups[-1].append(entry)
                continue
        groups.append([entry])
    return groups


def _decode_group(
    members: list[tuple[int, int, int]],
    tables: Tensor,
    lens: Sequence[int],
    starts: Sequence[int],
    block_size: int,
    window: int,
    device: torch.device,
) -> DecodeGroup:
    longest = members[0][0]
    # A padding block repeats the row's first one. That block is full, so that it holds no unwritten
    # slot: a row of one block is never padded, since 1 < GROUP_FILL * 2.
    assert GROUP_FILL * 2 > 1
    blocks = torch.empty((len(members), longest), dtype=torch.long)
    for i, (num_blocks, row, first_block) in enumerate(members):
        blocks[i, :num_blocks] = tables[row, first_block : first_block + num_blocks]
        if num_blocks < longest:
            blocks[i, num_blocks:] = blocks[i, 0]
    length = longest * block_size
    lens_ = torch.tensor([lens[row] for _, row, _ in members])
    from_ = torch.tensor([first * block_size for _, _, first in members])
    written = torch.tensor([num * block_size for num, _, _ in members])
    place = torch.arange(length)[None]
    ends = (lens_ - from_)[:, None]
    attended = place < ends
    if window:
        attended &= place >= (ends - window)
    unwritten = ((place >= ends) & (place < written[:, None])).view(-1).nonzero().view(-1)
    return DecodeGroup(
        tokens=torch.tensor([starts[row] for _, row, _ in members], device=device),
        blocks=Gather(blocks.view(-1).to(device)),
        mask=None if bool(attended.all()) else attended[None, :, None, :].to(device),
        unwritten=unwritten.to(device) if len(unwritten) else None,
    )


def _prefill_mask(
    first_query: int, seq_len: int, keys_from: int, window: int, device: torch.device
) -> Tensor | None:
    if first_query == 0 and (window == 0 or window >= seq_len):
        return None
    query = torch.arange(first_query, seq_len, device=device)[:, None]
    key = torch.arange(keys_from, seq_len, device=device)[None]
    mask = key <= query
    if window:
        mask &= key > query - window
    return mask


def _attend_group(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    group: DecodeGroup,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    num_kv_heads, dim = k_cache.shape[1], q.shape[2]
    rows = len(group.tokens)
    keys, values = group.blocks.of(k_cache), group.blocks.of(v_cache)
    if group.unwritten is not None:
        keys.index_fill_(1, group.unwritten, 0.0)
        values.index_fill_(1, group.unwritten, 0.0)
    # Query heads of one KV head stand where a prefill has its query tokens: [Hkv, n, G, D].
    grouped = q[group.tokens].view(rows, num_kv_heads, -1, dim).transpose(0, 1)
    sink = None if sinks is None else sinks.view(num_kv_heads, 1, -1, 1)
    result = _attend(
        grouped,
        keys.view(num_kv_heads, rows, -1, dim),
        values.view(num_kv_heads, rows, -1, dim),
        group.mask,
        False,
        scale,
        softcap,
        sink,
    )
    out[group.tokens] = result.transpose(0, 1).reshape(rows, -1, dim)


def _attend_row(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: PrefillRow,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    num_kv_heads, dim = k_cache.shape[1], q.shape[2]
    query_len = row.end - row.start
    keys = row.blocks.of(k_cache)[:, : row.num_keys]
    values = row.blocks.of(v_cache)[:, : row.num_keys]
    grouped = q[row.start : row.end].view(query_len, num_kv_heads, -1, dim).permute(1, 2, 0, 3)
    heads = grouped.shape[1]
    sink = None if sinks is None else sinks.view(num_kv_heads, heads, 1, 1)
    result = _attend(
        grouped,
        keys[:, None].expand(-1, heads, -1, -1),
        values[:, None].expand(-1, heads, -1, -1),
        row.mask,
        row.mask is None,
        scale,
        softcap,
        sink,
    )
    out[row.start : row.end] = result.permute(2, 0, 1, 3).reshape(query_len, -1, dim)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    sink: Tensor | None,
) -> Tensor:
    """q [B, H, M, D] over k, v [B, H, L, D]."""
    if softcap == 0.0 and sink is None:
        # torch's CPU and CUDA implementations keep scores and softmax in fp32.
        mask4 = mask if mask is None or mask.dim() == 4 else mask[None, None]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask4, is_causal=causal, scale=scale
        )
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sink is not None:
        sink_scores = sink.float().expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, sink_scores), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return torch.matmul(weights, v.float()).to(q.dtype)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    *,
    delta: Tensor | None = None,
    offset: bool = False,
) -> Tensor:
    """Norm of the rows of x [T, D]; delta, where given, is added to x in place first.

    weight * y, y = x / sqrt(mean(x^2) + epsilon), as Llama has it; with offset (1 + weight) * y in
    fp32, as Gemma has it.
    """
    check_norm(x, weight, delta)
    if delta is not None:
        x.add_(delta)
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (y * (1.0 + weight.float())).to(x.dtype) if offset else weight * y.to(x.dtype)


def gated_activation(both: Tensor, *, gelu: bool = False) -> Tensor:
    """act(both[:, :D]) * both[:, D:] for both [T, 2 D]; act is silu, or gelu in its tanh form."""
    check_gate(both)
    gate, up = both.chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up


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

    Returns the queries, a view [T, Hq, D]. cosine and sine [positions, half] are fp32 and hold what
    the model's dtype holds. With weights [D], every head goes through an RMSNorm first. What qkv
    holds of keys and values afterwards is not defined.
    """
    check_rotary(qkv, k_cache, v_cache, slot_mapping, positions, cosine, sine, q_weight, k_weight)
    num_kv_heads, dim, half = k_cache.shape[1], k_cache.shape[3], cosine.shape[1]
    heads = qkv.unflatten(1, (-1, dim))
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), 1)
    c, s = (table[positions].to(q.dtype)[:, None] for table in (cosine, sine))
    rotated = []
    for plain, weight in ((q, q_weight), (k, k_weight)):
        whole = plain
        if weight is not None:
            flat = plain.reshape(-1, dim)
            whole = rms_norm(flat, weight, epsilon, offset=offset).view(plain.shape)
        x, y, rest = whole.split((half, half, dim - 2 * half), -1)
        rotated.append(torch.cat((x * c - y * s, y * c + x * s, rest), -1))
    q.copy_(rotated[0])
    store_kv(rotated[1], v, k_cache, v_cache, slot_mapping)
    return q
