"""Owns the first touch of the KV cache's memory on a CPU.

The system gives memory when it is first written, and clears it then. On large pages that takes
hundreds of microseconds for each, on a virtual machine whose host has to find them first several
milliseconds; whoever stores keys and values there waits for it, and with him the step. So a thread
takes the memory of the blocks that come next: the scheduler gives blocks that no request has had
yet in their order.

Bounds: it goes at most `ahead_bytes` beyond the highest block that a step has had, and begins when
less than half of that is left; it ends when it is there, so that none stays behind. At most one
runs. Nobody waits for it: a block whose memory is not there yet costs what it did before. It is
nice to others, for what it does is not urgent.
"""

import ctypes
import os
import threading

from torch import Tensor

AHEAD_BYTES = 256 << 20
PIECE_BYTES = 2 << 20  # a large page
NICENESS = 10
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14 and later; refused by others


class PagesAhead:
    """Of one cache, whose first dimension is blocks. `reach` is for one thread."""

    def __init__(self, cache: Tensor, ahead_bytes: int = AHEAD_BYTES) -> None:
        assert cache.device.type == "cpu", "a device has its memory from the beginning"
        self._cache = cache
        self._block_bytes = cache.nbytes // len(cache)
        self._ahead_bytes = ahead_bytes
        self._taken_bytes = 0  # from the cache's beginning on
        self._thread: threading.Thread | None = None
        self._advise = ctypes.CDLL(None, use_errno=True).madvise  # lets other threads run meanwhile
        self._advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    @property
    def taken_bytes(self) -> int:
        """So much of the cache's beginning has its memory."""
        return self._taken_bytes

    def reach(self, block: int) -> None:
        """A step has blocks up to this one; begins to take what comes behind it, where needed."""
        used, all_bytes = (block + 1) * self._block_bytes, self._cache.nbytes
        if self._taken_bytes == all_bytes or self._taken_bytes - used >= self._ahead_bytes // 2:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        end = min(all_bytes, used + self._ahead_bytes)
        self._thread = threading.Thread(
            target=self._take, args=(end,), name="kv-pages-ahead", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Until the thread that runs now has ended; for tests and measurements."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _take(self, end: int) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        begin = self._cache.data_ptr()
        while self._taken_bytes < end:
            size = min(PIECE_BYTES, end - self._taken_bytes)
            if self._advise(*_pages(begin + self._taken_bytes, size), _POPULATE_WRITE) != 0:
                self._taken_bytes = self._cache.nbytes  # not on this system: no thread again
                return
            self._taken_bytes += size


def _pages(begin: int, size: int) -> tuple[int, int]:
    """The pages that hold these bytes: where they begin, and their size."""
    page = os.sysconf("SC_PAGE_SIZE")
    first = begin // page * page
    return first, -(-(begin + size) // page) * page - first
