"""Owns the host blocks, and copies whole blocks between them and the device's.

A block with all its layers is one contiguous piece on either side, so a pair of an operation is one
copy. COPY goes into the lane in which steps are computed; swaps into a lane beside it. On CUDA that
is a side stream: it first waits for what the main stream has been given so far, and host memory is
pinned, so that a copy runs beside the next kernels. On a CPU every copy is made at once, and pages
of host memory are taken as blocks are first written.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gpu_worker.ports import Operation, OperationKind
from kernels.native import memory

MEASURED_BYTES = 32 * 2**20
LEAST_MEASURED_BLOCKS, MOST_MEASURED_BLOCKS = 8, 256
MEASURED_RUNS = 8  # other processes start beside this one: the best of few may be far off


class HostMemoryError(Exception):
    """The host blocks can't be had; the message has the numbers."""


class Done(Protocol):
    """When copies have been made; torch.cuda.Event is one."""

    def query(self) -> bool:
        """They have."""

    def synchronize(self) -> None:
        """Waits until they have."""


class Lane(Protocol):
    """Where copies are made, one after the other."""

    def run(self, copy: Callable[[], None]) -> Done:
        """Makes copies, or has them made, after all that has been computed so far."""


class _Made:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class AtOnce:
    """The CPU's only lane."""

    def run(self, copy: Callable[[], None]) -> Done:
        """See Lane."""
        copy()
        return _Made()


class MainStream:
    """CUDA, in the order of the steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, copy: Callable[[], None]) -> Done:
        """See Lane."""
        copy()
        made: Done = torch.cuda.current_stream(self._device).record_event()
        return made


class SideStream:
    """CUDA, beside the steps that come after."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, copy: Callable[[], None]) -> Done:
        """See Lane."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
        made: Done = self._stream.record_event()
        return made


class BlockCopies:
    """Begins operations and says which are done. Blocks have been checked by the replica.

    `device` and `host` are [blocks, elements of a block]; `host` may have no blocks.
    """

    def __init__(self, device: Tensor, host: Tensor, *, main: Lane, side: Lane) -> None:
        assert device.is_contiguous(), "a block is one contiguous piece"
        assert host.is_contiguous(), "a block is one contiguous piece"
        self.device = device
        self.host = host
        self._main = main
        self._side = side
        self._in_flight: list[tuple[int, Done]] = []

    def begin(self, operations: Sequence[Operation]) -> None:
        """In their order."""
        for operation in operations:
            match operation.kind:
                case OperationKind.COPY:
                    lane, source, target = self._main, self.device, self.device
                case OperationKind.SWAP_OUT:
                    lane, source, target = self._side, self.device, self.host
                case OperationKind.SWAP_IN:
                    lane, source, target = self._side, self.host, self.device
                case _:
                    raise ValueError(f"unknown kind of operation: {operation.kind}")
            pairs = list(zip(operation.source_blocks, operation.target_blocks, strict=True))
            done = lane.run(lambda s=source, t=target, p=pairs: _copy(s, t, p))  # type: ignore[misc]
            self._in_flight.append((operation.op_id, done))

    def finished(self, *, wait: bool) -> list[int]:
        """Ids of those done since the last call; with `wait` of all."""
        finished: list[int] = []
        going_on: list[tuple[int, Done]] = []
        for op_id, done in self._in_flight:
            if wait:
                done.synchronize()
            if wait or done.query():
                finished.append(op_id)
            else:
                going_on.append((op_id, done))
        self._in_flight = going_on
        return finished


def _copy(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    for source_block, target_block in pairs:
        target[target_block].copy_(source[source_block], non_blocking=True)


def make(cache: Tensor, num_host_blocks: int) -> BlockCopies:
    """For a cache whose first dimension counts blocks. Raises HostMemoryError."""
    device = cache.view(cache.shape[0], -1)
    shape = (num_host_blocks, device.shape[1])
    if cache.device.type != "cuda":
        lane = AtOnce()
        return BlockCopies(device, memory.zeros(shape, cache.dtype), main=lane, side=lane)
    try:
        host = torch.empty(shape, dtype=cache.dtype, pin_memory=True)
    except RuntimeError as error:
        raise HostMemoryError(
            f"{num_host_blocks} host blocks can't be pinned, lower QUIRE_SWAP_SPACE_GIB: {error}"
        ) from error
    return BlockCopies(device, host, main=MainStream(cache.device), side=SideStream(cache.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapBandwidth:
    """10^9 bytes per second; 0: there are no host blocks."""

    out_gb_per_s: float = 0.0
    in_gb_per_s: float = 0.0


def measure(copies: BlockCopies) -> SwapBandwidth:
    """Copies real blocks both ways; overwrites the first ones. Best of MEASURED_RUNS.

    The first round is not timed: it takes the pages of both sides from the system.
    """
    block_bytes = copies.device.shape[1] * copies.device.element_size()
    wanted = min(max(MEASURED_BYTES // block_bytes, LEAST_MEASURED_BLOCKS), MOST_MEASURED_BLOCKS)
    blocks = range(min(wanted, copies.device.shape[0], copies.host.shape[0]))
    if not blocks:
        return SwapBandwidth()

    def best_gb_per_s(kind: OperationKind) -> float:
        times_ns = []
        for _ in range(MEASURED_RUNS):
            operation = Operation(op_id=0, kind=kind, source_blocks=blocks, target_blocks=blocks)
            began = time.perf_counter_ns()
            copies.begin([operation])
            copies.finished(wait=True)
            times_ns.append(time.perf_counter_ns() - began)
        return len(blocks) * block_bytes / max(1, min(times_ns))

    for kind in (OperationKind.SWAP_IN, OperationKind.SWAP_OUT):
        best_gb_per_s(kind)
    return SwapBandwidth(
        out_gb_per_s=best_gb_per_s(OperationKind.SWAP_OUT),
        in_gb_per_s=best_gb_per_s(OperationKind.SWAP_IN),
    )
