"""The compiled Triton kernels on a real GPU: same cases, same answers as everywhere else."""

import pytest
import torch

from tests.kernels.cases import Case, build, expected, worst
from tests.kernels.on_device import checks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),
]


def test_all_operators() -> None:
    """The list that the GPU script runs as much of as its time allows, whole."""
    errors = {name: check() for name, check in checks(torch.device("cuda"), (1000, 128_256))}
    assert {name: error for name, error in errors.items() if not error <= 1} == {}


def test_blocks_past_two_gigabytes() -> None:
    """The cache holds more elements than 32 bits count; the row stands at its far end."""
    from kernels.paged_attention import paged_attention

    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free memory")
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
