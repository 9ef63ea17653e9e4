"""Sizes of the KV cache, and which setting decides them."""

from pathlib import Path

import pytest
import torch

from deploy.k8s_check import memory_checks
from gpu_worker import kv_cache
from gpu_worker.kv_cache import GIB, CacheTooSmallError, SizingRequest
from gpu_worker.models import KvShape

SHAPE = KvShape(num_layers=30, num_kv_heads=3, head_dim=64, windows=(0,) * 30)


def request(**changes: float) -> SizingRequest:
    """Nothing set but the block size."""
    values = {
        "num_gpu_blocks_override": 0,
        "kv_cache_gib": 0.0,
        "block_size": 16,
        "max_model_len": 0,
        **changes,
    }
    return SizingRequest(**values)  # type: ignore[arg-type]


def test_a_block_holds_all_layers() -> None:
    size = kv_cache.block_bytes(SHAPE, 16, torch.bfloat16)
    assert size == 30 * 2 * 3 * 16 * 64 * 2
    assert kv_cache.block_bytes(SHAPE, 16, torch.float32) == 2 * size


def test_the_override_wins_then_the_size_then_memory() -> None:
    every = request(num_gpu_blocks_override=7, kv_cache_gib=1.0)
    assert kv_cache.choose_num_blocks(every, 1 << 20, 10 * GIB) == 7
    sized = request(kv_cache_gib=0.5)
    assert kv_cache.choose_num_blocks(sized, 1 << 20, 10 * GIB) == 512
    assert kv_cache.choose_num_blocks(request(), 1 << 20, 10 * GIB) == 10 * 1024


def test_no_room_for_a_block_is_an_error_with_the_numbers() -> None:
    with pytest.raises(CacheTooSmallError, match=r"1000 bytes .* hold no block of 2000 bytes"):
        kv_cache.choose_num_blocks(request(), 2000, 1000)


def test_the_longest_request_is_the_models_as_far_as_the_cache_goes() -> None:
    assert kv_cache.choose_max_model_len(request(), 8192, 1000) == 8192
    assert kv_cache.choose_max_model_len(request(), 8192, 100) == 1600
    assert kv_cache.choose_max_model_len(request(max_model_len=512), 8192, 100) == 512


def test_a_length_that_was_asked_for_and_does_not_fit_is_an_error() -> None:
    with pytest.raises(CacheTooSmallError, match=r"QUIRE_MAX_MODEL_LEN=1601 .*100 blocks"):
        kv_cache.choose_max_model_len(request(max_model_len=1601), 8192, 100)
    with pytest.raises(CacheTooSmallError, match="over the model's 8192 positions"):
        kv_cache.choose_max_model_len(request(max_model_len=9000), 8192, 1000)


def test_a_cpu_gives_a_quarter_of_its_memory_up_to_four_gib() -> None:
    assert kv_cache.cpu_cache_bytes(8 * GIB) == 2 * GIB
    assert kv_cache.cpu_cache_bytes(64 * GIB) == 4 * GIB


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_host_blocks_are_as_many_as_the_setting_holds() -> None:
    for device in (CPU, CUDA):
        assert kv_cache.choose_num_host_blocks(0.5, 1 << 20, device, GIB) == 512
        assert kv_cache.choose_num_host_blocks(0.5, (1 << 20) + 1, device, GIB) == 511
        assert kv_cache.choose_num_host_blocks(0.0, 1 << 20, device, GIB) == 0
    with pytest.raises(CacheTooSmallError, match=r"QUIRE_SWAP_SPACE_GIB=2 .* 1073741824 bytes"):
        kv_cache.choose_num_host_blocks(2.0, 1 << 20, CPU, GIB)


def test_unasked_host_blocks_take_an_eighth_of_memory_up_to_a_bound() -> None:
    assert kv_cache.choose_num_host_blocks(-1.0, 1 << 20, CPU, 4 * GIB) == 512
    assert kv_cache.choose_num_host_blocks(-1.0, 1 << 20, CPU, 64 * GIB) == 1024
    assert kv_cache.choose_num_host_blocks(-1.0, 1 << 20, CUDA, 4 * GIB) == 512
    assert kv_cache.choose_num_host_blocks(-1.0, 1 << 20, CUDA, 64 * GIB) == 4096


def test_a_device_gives_its_share_less_what_a_step_takes() -> None:
    memory = kv_cache.DeviceMemory(total=1000, free=700, reserved=200, peak=350, trial_cache=50)
    assert kv_cache.device_cache_bytes(memory, 0.9) == 900 - 100 - 300
    assert kv_cache.device_cache_bytes(memory, 0.3) == 0


def test_memory_is_the_machines_within_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 64 kB\n")
    assert kv_cache.available_memory_bytes(tmp_path, tmp_path / "none") == 65536
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert kv_cache.available_memory_bytes(tmp_path, tmp_path) == 65536
    (tmp_path / "memory.max").write_text("21000\n")
    assert kv_cache.available_memory_bytes(tmp_path, tmp_path) == 20000
    assert kv_cache.available_memory_bytes() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_is_zeros_and_its_pages_are_not_touched(dtype: torch.dtype) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    cache = kv_cache.allocate(kv_cache.layout(SHAPE, 16, 3000), dtype, torch.device("cpu"))
    assert cache.shape == (3000, 30, 2, 3, 16, 64)
    assert cache.dtype == dtype
    assert resident_bytes() - before < cache.nbytes / 10
    assert not cache[[0, 1500, 2999]].any()
    cache[7, 2, 1, 0, 3] = 1.5
    assert float(cache[7].sum()) == 1.5 * 64


def test_manifests_are_checked_with_the_same_numbers() -> None:
    """`make k8s-check` adds up memory without importing torch."""
    assert memory_checks.KV_SHARE == kv_cache.CPU_SHARE
    assert memory_checks.POOL_SHARE == kv_cache.HOST_SHARE
    most = {"gpu": kv_cache.HOST_MOST_BYTES["cuda"], "cpu": kv_cache.HOST_MOST_BYTES["cpu"]}
    assert {kind: gib * kv_cache.GIB for kind, gib in memory_checks.POOL_MOST_GIB.items()} == most
    assert memory_checks.KV_MOST_GIB * kv_cache.GIB == kv_cache.CPU_MOST_BYTES
