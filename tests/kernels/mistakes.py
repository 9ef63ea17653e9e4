"""Calls with one mistake each, and what a refusal must name."""

from dataclasses import replace
from typing import Any

import torch

from tests.kernels.cases import Case, build

# mistake -> words of the refusal
ATTENTION = {
    "heads": "multiple of kv heads",
    "head_dim": "head dim must be the cache's",
    "dtype": "one dtype",
    "cache_dtype": "fp32, bf16 or fp16",
    "cache_strides": "one stride",
    "block_size": "block size must be",
    "large_head": "head dim must be 1 to 256",
    "q_dims": "q must be",
    "q_strided": "contiguous in its last",
    "tables_dtype": "block_tables must be int32",
    "lens_shape": "seq_lens must be",
    "starts_shape": "query_start_loc must be",
    "sinks_shape": "sinks must be",
    "window": "window must not be negative",
    "softcap": "softcap must not be negative",
    "device": "must be on cpu",
}
STORE = {
    "store_heads": "kv heads and head dim",
    "store_values": "one shape",
    "store_dtype": "one dtype",
    "store_slots_dtype": "slot_mapping must be int64",
    "store_slots_shape": "one entry a token",
}


def message_of(name: str, attention: Any, store: Any) -> str:
    """Makes the mistaken call; "" when it was not refused."""
    case = Case(rows=((1, 9), (3, 17)), sinks=True)
    good = build(case)
    try:
        if name in STORE:
            _store(name, store, good)
        else:
            tensors, more = _attention(name, good)
            tensors.call(attention, case, **more)
    except ValueError as error:
        return str(error)
    return ""


def _attention(name: str, t: Any) -> tuple[Any, dict[str, Any]]:
    wide = torch.zeros(4, 2, 16, 257)
    tiny = torch.zeros(4, 2, 2, 64)
    changed: dict[str, dict[str, Any]] = {
        "heads": {"q": t.q[:, :3]},
        "head_dim": {"q": t.q[:, :, :32]},
        "dtype": {"q": t.q.bfloat16()},
        "cache_dtype": {"k_cache": t.k_cache.double(), "v_cache": t.v_cache.double()},
        "cache_strides": {"v_cache": t.v_cache.contiguous()},
        "block_size": {"k_cache": tiny, "v_cache": tiny},
        "large_head": {"k_cache": wide, "v_cache": wide, "q": torch.zeros(4, 4, 257)},
        "q_dims": {"q": t.q[None]},
        "q_strided": {"q": t.q.repeat(1, 1, 2)[:, :, ::2]},
        "tables_dtype": {"block_tables": t.block_tables.long()},
        "lens_shape": {"seq_lens": t.seq_lens[:1]},
        "starts_shape": {"query_start_loc": t.query_start_loc[:2]},
        "sinks_shape": {"sinks": t.sinks[:3]},
        "device": {"seq_lens": t.seq_lens.to("meta")},
    }
    if name == "device":
        # Tensors.call moves all to one device; keep the mistake out of its reach.
        meta = changed[name]["seq_lens"]
        return t, {"sinks": torch.empty(4, device=meta.device)}
    if name in changed:
        return replace(t, **changed[name]), {}
    return t, {name: -1}


def _store(name: str, store: Any, t: Any) -> None:
    k = torch.zeros(5, 2, 64)
    v = k.clone()
    slots = torch.arange(5)
    if name == "store_heads":
        k = v = torch.zeros(5, 3, 64)
    elif name == "store_values":
        v = v[:4]
    elif name == "store_dtype":
        k = k.half()
    elif name == "store_slots_dtype":
        slots = slots.int()
    elif name == "store_slots_shape":
        slots = slots[:4]
    store(k, v, t.k_cache, t.v_cache, slots)
