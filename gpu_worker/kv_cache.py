"""Owns the KV cache tensor: how many blocks, and the allocation.

In order: num_gpu_blocks_override, then kv_cache_gib, then by memory. On a CPU that is a quarter of
the memory available, at most 4 GiB; its pages are taken as blocks come into use, a bit ahead of
them (pages_ahead). On CUDA it is gpu_memory_utilization of the device, less what weights and a full
step take.

Host blocks, which swap needs, take swap_space_gib. Below 0 that is by memory: an eighth of what is
available, at most 4 GiB on CUDA and 1 GiB on a CPU.

The cache starts as zeros and holds whatever rows wrote after that.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.models import KvShape
from kernels.cache_layout import CacheLayout
from kernels.native import memory

GIB = 2**30
CPU_SHARE = 0.25
CPU_MOST_BYTES = 4 * GIB
HOST_SHARE = 0.125
HOST_MOST_BYTES = {"cuda": 4 * GIB, "cpu": GIB}


class CacheTooSmallError(Exception):
    """The cache can't hold what the settings ask for; the message has the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRequest:
    """The settings that decide, named as there."""

    num_gpu_blocks_override: int
    kv_cache_gib: float
    block_size: int
    max_model_len: int


def layout(shape: KvShape, block_size: int, num_blocks: int) -> CacheLayout:
    """Of a model's cache."""
    return CacheLayout(
        num_blocks=num_blocks,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        block_size=block_size,
        head_dim=shape.head_dim,
    )


def block_bytes(shape: KvShape, block_size: int, dtype: torch.dtype) -> int:
    """Of one block with all its layers."""
    return layout(shape, block_size, 1).block_bytes(dtype.itemsize)


def choose_num_blocks(request: SizingRequest, bytes_per_block: int, memory_bytes: int) -> int:
    """Blocks of the cache; memory_bytes is what is left for it when no setting says otherwise."""
    if request.num_gpu_blocks_override:
        return request.num_gpu_blocks_override
    budget = int(request.kv_cache_gib * GIB) if request.kv_cache_gib else memory_bytes
    num_blocks = budget // bytes_per_block
    if num_blocks < 1:
        raise CacheTooSmallError(
            f"{budget} bytes for the KV cache hold no block of {bytes_per_block} bytes"
        )
    return int(num_blocks)


def choose_max_model_len(request: SizingRequest, of_model: int, num_blocks: int) -> int:
    """Longest request: as asked, or the model's as far as the cache can hold one such request.

    Raises CacheTooSmallError when max_model_len was set and does not fit.
    """
    capacity = num_blocks * request.block_size
    if not request.max_model_len:
        return min(of_model, capacity)
    if request.max_model_len > of_model:
        raise CacheTooSmallError(
            f"QUIRE_MAX_MODEL_LEN={request.max_model_len} is over the model's {of_model} positions"
        )
    if request.max_model_len > capacity:
        raise CacheTooSmallError(
            f"QUIRE_MAX_MODEL_LEN={request.max_model_len} needs more than the KV cache's "
            f"{num_blocks} blocks of {request.block_size} tokens ({capacity})"
        )
    return request.max_model_len


def cpu_cache_bytes(available_bytes: int) -> int:
    """The share of memory that a worker on a CPU takes unasked."""
    return min(int(available_bytes * CPU_SHARE), CPU_MOST_BYTES)


def choose_num_host_blocks(
    swap_space_gib: float, bytes_per_block: int, device: torch.device, available_bytes: int
) -> int:
    """Blocks in host memory; available_bytes is what the process may still allocate.

    Raises CacheTooSmallError for more than that.
    """
    if swap_space_gib < 0:
        most = HOST_MOST_BYTES["cuda" if device.type == "cuda" else "cpu"]
        return min(int(available_bytes * HOST_SHARE), most) // bytes_per_block
    budget = int(swap_space_gib * GIB)
    if budget > available_bytes:
        raise CacheTooSmallError(
            f"QUIRE_SWAP_SPACE_GIB={swap_space_gib:g} is more than the {available_bytes} bytes of "
            "host memory that are available"
        )
    return budget // bytes_per_block


def available_memory_bytes(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """What this process may still allocate: the machine's, within its control group's limit."""
    available = 0
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    assert available > 0, "no MemAvailable in /proc/meminfo"
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Of a device after a full step over a trial cache, in bytes."""

    total: int
    free: int
    reserved: int  # by this process's allocator, used or not
    peak: int  # most that this process had allocated, the trial cache included
    trial_cache: int


def device_cache_bytes(memory: DeviceMemory, utilization: float) -> int:
    """What the share of the device leaves for the cache.

    Memory of other processes, and this one's outside of torch, counts as used.
    """
    others = memory.total - memory.free - memory.reserved
    step = memory.peak - memory.trial_cache
    return max(0, int(memory.total * utilization) - others - step)


def allocate(of: CacheLayout, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The cache, zeros. On a CPU its pages are taken later, by pages_ahead or a first write."""
    if device.type != "cpu":
        return torch.zeros(of.shape, dtype=dtype, device=device)
    return memory.zeros(of.shape, dtype)
