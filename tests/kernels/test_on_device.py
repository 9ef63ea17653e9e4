"""The compiled Triton kernels on a real GPU: same cases, same answers as everywhere else."""

import pytest
import torch

from tests.kernels.cases import TOLERANCES, Case, build, expected, worst
from tests.kernels.shapes import CASES
from tests.kernels.storing import differs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_awkward_shapes(dtype: torch.dtype) -> None:
    from kernels.paged_attention import paged_attention

    errors = {}
    for case in (case.at(dtype) for case in CASES):
        tensors = build(case)
        out = tensors.call(paged_attention, case, device="cuda")
        errors[str(case)] = worst(out, expected(case, tensors), dtype)
    assert {case: error for case, error in errors.items() if error > 1} == {}


@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "block_size"), [(1, 64, 4), (37, 80, 16), (19, 256, 5)]
)
def test_store(num_tokens: int, head_dim: int, block_size: int) -> None:
    from kernels.kv_store import store_kv

    def on_device(*tensors: torch.Tensor) -> None:
        moved = [t.cuda() for t in tensors]
        store_kv(moved[0], moved[1], moved[2], moved[3], moved[4])
        tensors[2].copy_(moved[2])
        tensors[3].copy_(moved[3])

    assert not differs(on_device, num_tokens, head_dim, block_size, 3)


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
