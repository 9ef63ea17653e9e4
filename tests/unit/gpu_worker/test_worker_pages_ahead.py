"""Memory of the cache's next blocks is taken before a step writes there, and not much of it."""

import ctypes
import mmap
import platform

import pytest
import torch

from gpu_worker.pages_ahead import PagesAhead

PAGE = mmap.PAGESIZE
BLOCK_PAGES, NUM_BLOCKS = 4, 64
RELEASE = tuple(int(part) for part in platform.release().split(".")[:2])

pytestmark = pytest.mark.skipif(RELEASE < (5, 14), reason="this Linux can't take pages ahead")


@pytest.fixture
def cache() -> torch.Tensor:
    """Blocks of four small pages, none of which is there."""
    raw = mmap.mmap(
        -1, NUM_BLOCKS * BLOCK_PAGES * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    raw.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(raw, dtype=torch.float32).view(NUM_BLOCKS, -1)


def pages_there(cache: torch.Tensor) -> list[bool]:
    """Of each page, whether it has memory."""
    count = cache.nbytes // PAGE
    seen = (ctypes.c_ubyte * count)()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(cache.data_ptr(), cache.nbytes, seen) == 0
    return [bool(flag & 1) for flag in seen]


def blocks(count: int) -> int:
    """Bytes of so many."""
    return count * BLOCK_PAGES * PAGE


def reached(pages: PagesAhead, block: int) -> int:
    """Blocks that have their memory once a step has had this one."""
    pages.reach(block)
    pages.wait(30.0)
    return pages.taken_bytes // (BLOCK_PAGES * PAGE)


def test_the_blocks_behind_the_highest_one_get_their_memory(cache: torch.Tensor) -> None:
    cache[0] = 7.0
    pages = PagesAhead(cache, ahead_bytes=blocks(8))
    assert sum(pages_there(cache)) == BLOCK_PAGES
    assert reached(pages, 2) == 11
    there = pages_there(cache)
    assert all(there[: 11 * BLOCK_PAGES])
    assert not any(there[11 * BLOCK_PAGES :])
    assert cache[0].eq(7.0).all()
    assert not cache[1:].any()


def test_it_goes_on_when_less_than_half_is_left(cache: torch.Tensor) -> None:
    pages = PagesAhead(cache, ahead_bytes=blocks(8))
    assert [reached(pages, block) for block in (0, 3, 4, 5, 0, 9)] == [9, 9, 9, 14, 14, 14]


def test_it_ends_with_the_cache(cache: torch.Tensor) -> None:
    pages = PagesAhead(cache, ahead_bytes=blocks(8))
    assert reached(pages, NUM_BLOCKS - 2) == NUM_BLOCKS
    assert all(pages_there(cache))
    assert reached(pages, NUM_BLOCKS - 1) == NUM_BLOCKS


def test_pages_that_blocks_share_are_taken_whole() -> None:
    """A block need not be a number of pages, nor the cache begin with one."""
    cache = torch.zeros(1000, 33)
    assert reached_all(PagesAhead(cache), cache)


def reached_all(pages: PagesAhead, cache: torch.Tensor) -> bool:
    """With much more ahead than there is."""
    pages.reach(0)
    pages.wait(30.0)
    return pages.taken_bytes == cache.nbytes
