"""The compiled Triton kernels on a real GPU: same cases, same answers as everywhere else."""

import pytest
import torch
from torch import Tensor

from kernels.cache_layout import CacheLayout, layer_views
from tests.kernels.cases import Case, build, expected, worst
from tests.kernels.on_device import checks
from tests.kernels.sampling_cases import random_logits, random_rows, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),
]


def test_all_operators() -> None:
    """The list that the GPU script runs as much of as its time allows, whole."""
    errors = {name: check() for name, check in checks(torch.device("cuda"), (1000, 128_256))}
    assert {name: error for name, error in errors.items() if not error <= 1} == {}


def need_free_gib(count: int) -> None:
    """Skips where the device has less."""
    if torch.cuda.mem_get_info()[0] < count << 30:
        pytest.skip(f"needs {count} GiB of free memory")


def test_blocks_past_two_gigabytes() -> None:
    """The cache holds more elements than 32 bits count; the row stands at its far end."""
    from kernels.paged_attention import paged_attention

    need_free_gib(18)
    case = Case(rows=((1, 33), (5, 40)), dtype=torch.bfloat16)
    tensors = build(case)
    small = tensors.k_cache
    num_blocks = 2**32 // small[0].numel() + small.shape[0]
    moved = []
    for cache in (tensors.k_cache, tensors.v_cache):
        wide = torch.empty((num_blocks, *small.shape[1:]), dtype=case.dtype, device="cuda")
        wide[-small.shape[0] :] = cache.cuda()
        moved.append(wide)
    shift = num_blocks - small.shape[0]
    out = paged_attention(
        tensors.q.cuda(),
        moved[0],
        moved[1],
        (tensors.block_tables.clamp(max=small.shape[0]) + shift).cuda(),
        tensors.seq_lens.cuda(),
        tensors.query_start_loc.cuda(),
        scale=case.head_dim**-0.5,
        max_query_len=5,
        max_seq_len=40,
    )
    assert worst(out.cpu(), expected(case, tensors), case.dtype) <= 1


HEADS, KV_HEADS, DIM, BLOCK_SIZE = 3, 2, 64, 16
TOKENS = 5


def far_cache() -> tuple[Tensor, Tensor]:
    """Of more elements than 32 bits count, its last block empty; the first slots of that block."""
    need_free_gib(9)
    elements = 2 * KV_HEADS * BLOCK_SIZE * DIM
    layout = CacheLayout(
        num_blocks=2**32 // elements + 2,
        num_layers=1,
        num_kv_heads=KV_HEADS,
        block_size=BLOCK_SIZE,
        head_dim=DIM,
    )
    cache = torch.empty(layout.shape, dtype=torch.bfloat16, device="cuda")
    cache[-1:] = 0.0
    slots = [layout.slot(layout.num_blocks - 1, offset) for offset in range(TOKENS)]
    return cache, torch.tensor(slots, device="cuda")


def test_store_past_two_gigabytes() -> None:
    from kernels import reference
    from kernels.kv_store import store_kv

    cache, slots = far_cache()
    near = torch.zeros_like(cache[-1:], device="cpu")
    k, v = torch.randn(2, TOKENS, KV_HEADS, DIM).bfloat16()
    store_kv(k.cuda(), v.cuda(), *layer_views(cache, 0), slots)
    reference.store_kv(k, v, *layer_views(near, 0), torch.arange(TOKENS))
    assert torch.equal(cache[-1:].cpu(), near)


def test_rotary_store_past_two_gigabytes() -> None:
    from kernels import reference
    from kernels.rotary_store import rotary_store

    cache, slots = far_cache()
    near = torch.zeros_like(cache[-1:], device="cpu")
    qkv = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * DIM).bfloat16()
    at, angles = torch.arange(TOKENS), torch.randn(TOKENS, DIM // 2)
    tables = (angles.cos(), angles.sin())
    ours = qkv.cuda()
    rotary_store(ours, *layer_views(cache, 0), slots, at.cuda(), *(t.cuda() for t in tables))
    reference.rotary_store(qkv, *layer_views(near, 0), at, at, *tables)
    assert worst(cache[-1:].cpu(), near.double(), torch.bfloat16) <= 1
    assert worst(ours.cpu(), qkv.double(), torch.bfloat16) <= 1


def test_sampling_does_not_wait_for_the_device() -> None:
    """From rows on the host to tokens and logprobs on the device."""
    from kernels.logprobs import logprobs
    from kernels.sampler import sample

    device, vocabulary = torch.device("cuda"), 1000
    logits = random_logits("plain", 8, vocabulary, 1).to(device)
    rows = random_rows(8, vocabulary, 1, changed=True)

    def step() -> None:
        tokens = sample(logits, tensors(rows, vocabulary).to(device))
        logprobs(logits, tokens, 20)

    step()  # the first one compiles and loads kernels, which may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            logits[0, 0].item()  # what waits is seen
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
