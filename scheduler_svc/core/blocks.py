"""The block pool of one worker: reference counts, prefix index, free blocks by their last use.

Invariants: a block is free (count 0), owned by requests or, if all its owners are operations that
copy it to or from host memory, waiting for them; a free block that is in the index is cached and
may be taken by a hit or evicted; the index maps a name to exactly one block. A worker runs plans in
order, so a freed block may go to any later plan at once; a copy beside the plans is no part of that
order, so its blocks wait for it.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from scheduler_svc.core.types import BlockHash, BlockId, PrefixStop
from scheduler_svc.core.value import value

# What the index knows of a block: its name, its parent's, its tokens. A plain tuple, since a
# sixteenth of all rows fill one in each step and a class of its own costs a call.
CachedBlock = tuple[BlockHash, BlockHash, bytes]


@value(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """Cached blocks of a prefix, and why there are no more."""

    blocks: list[BlockId]
    stop: PrefixStop


class BlockPool:
    """Device blocks 0..num_blocks-1 of one worker.

    Names of the last num_blocks evictions are kept, to tell what was evicted from what is new.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Blocks that can be allocated, cached ones included.
        self.num_free = num_blocks
        # Owners taken from blocks so far; as long as it stays, no more blocks are free.
        self.num_released = 0
        self._counts = [0] * num_blocks
        # Of the owners those that are operations, for blocks that have any.
        self._held: dict[BlockId, int] = {}
        # Free blocks that are not cached, the next one last; and cached ones, the oldest first.
        self._blank = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._kept: OrderedDict[BlockId, None] = OrderedDict()
        self._index: dict[BlockHash, BlockId] = {}
        self._cached: dict[BlockId, CachedBlock] = {}
        self._evicted: OrderedDict[BlockHash, None] = OrderedDict()

    @property
    def num_used(self) -> int:
        """Blocks that requests own."""
        return self.num_blocks - self.num_free - self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Blocks that will be free once operations are done, cached ones included."""
        if not self._held:
            return 0
        return sum(self._counts[block] == num_held for block, num_held in self._held.items())

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix index."""
        return len(self._cached)

    def allocate(self, count: int) -> list[BlockId] | None:
        """Takes `count` blocks, evicting the oldest; None, unchanged, if too few are free."""
        blank, counts = self._blank, self._counts
        if count > self.num_free:
            return None
        self.num_free -= count
        first = max(0, len(blank) - count)
        taken = blank[first:]
        taken.reverse()
        del blank[first:]
        if len(taken) < count:
            self._evict(count - len(taken), taken)
        for block in taken:
            assert counts[block] == 0, f"free block {block} has owners"
            counts[block] = 1
        return taken

    def match(
        self, names: Iterable[BlockHash], start: BlockHash, tokens_of: Callable[[int], bytes]
    ) -> PrefixMatch:
        """The longest cached prefix. Does not take its blocks.

        Parent and token ids are compared, so that two prompts with one name can't share KV;
        tokens_of(i) gives the ids of block i and is asked for hits only.
        """
        found: list[BlockId] = []
        stop, parent = PrefixStop.END, start
        for index, name in enumerate(names):
            block = self._index.get(name)
            if block is None:
                stop = PrefixStop.EVICTED if name in self._evicted else PrefixStop.COLD
                break
            _, known_parent, known_tokens = self._cached[block]
            if known_parent != parent or known_tokens != tokens_of(index):
                stop = PrefixStop.COLLISION
                break
            found.append(block)
            parent = name
        return PrefixMatch(blocks=found, stop=stop)

    def has(self, name: BlockHash) -> bool:
        """Whether a block has this name."""
        return name in self._index

    def why_missing(self, name: BlockHash) -> PrefixStop | None:
        """Why no block has this name; None if one has."""
        if name in self._index:
            return None
        return PrefixStop.EVICTED if name in self._evicted else PrefixStop.COLD

    def num_free_among(self, blocks: Iterable[BlockId]) -> int:
        """How many of `blocks` are free now, so that sharing them uses free blocks up."""
        return list(map(self._counts.__getitem__, blocks)).count(0)

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Adds an owner to blocks that `match` found, or that a running request owns."""
        for block in blocks:
            if self._counts[block] == 0:
                assert block in self._cached, f"block {block} is neither owned nor cached"
                del self._kept[block]
                self.num_free -= 1
            self._counts[block] += 1

    def is_shared(self, block: BlockId) -> bool:
        """Whether the block has more than one owner, so that nobody may write into it."""
        return self._counts[block] > 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Takes an owner from each block. Tails of a chain will be evicted before its head."""
        counts, cached, kept, blank = self._counts, self._cached, self._kept, self._blank
        self.num_released += len(blocks)
        for block in reversed(blocks):
            left = counts[block] - 1
            assert left >= 0, f"block {block} is freed twice"
            counts[block] = left
            if left:
                continue
            if block in cached:
                kept[block] = None
            else:
                blank.append(block)
        self.num_free = len(blank) + len(kept)

    def num_shared(self, blocks: Sequence[BlockId]) -> int:
        """How many of the first are cached and have other owners, so that they can be found again.

        Of a chain the first blocks have the most owners.
        """
        counts, cached = self._counts, self._cached
        pairs = enumerate(blocks)
        return next((i for i, b in pairs if counts[b] < 2 or b not in cached), len(blocks))

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """One owner of each block is an operation from now on."""
        for block in blocks:
            self._held[block] = self._held.get(block, 0) + 1

    def let_go(self, blocks: Sequence[BlockId]) -> None:
        """Takes from each block an owner that is an operation."""
        for block in blocks:
            num_held = self._held.pop(block) - 1
            if num_held:
                self._held[block] = num_held
        self.release(blocks)

    def publish(self, filled: Iterable[tuple[BlockId, CachedBlock]]) -> None:
        """Puts filled blocks into the index, but for names that other blocks already have."""
        counts, cached, index = self._counts, self._cached, self._index
        for block, entry in filled:
            assert counts[block] > 0, f"block {block} is published without an owner"
            assert block not in cached, f"block {block} is published twice"
            if index.setdefault(entry[0], block) == block:
                cached[block] = entry

    def _evict(self, count: int, taken: list[BlockId]) -> None:
        """Takes the cached blocks that have been free longest out of the index, into `taken`."""
        kept, cached, index, evicted = self._kept, self._cached, self._index, self._evicted
        for _ in range(count):
            block = kept.popitem(last=False)[0]
            name = cached.pop(block)[0]
            del index[name]
            evicted[name] = None
            if len(evicted) > self.num_blocks:
                evicted.popitem(last=False)
            taken.append(block)

    def check(
        self, owned: Iterable[Sequence[BlockId]], held: Iterable[Sequence[BlockId]] = ()
    ) -> None:
        """Asserts the invariants against all block tables, and what operations hold."""
        counts, num_held = [0] * self.num_blocks, Counter(chain.from_iterable(held))
        assert num_held == self._held, "other blocks wait for operations"
        for block, count in num_held.items():
            counts[block] += count
        for table in owned:
            assert len(set(table)) == len(table), "a block stands twice in one table"
            for block in table:
                counts[block] += 1
        assert counts == self._counts, "reference counts differ from the block tables"
        free = [block for block, count in enumerate(counts) if not count]
        assert free == sorted([*self._blank, *self._kept]), "free blocks differ from the counts"
        assert self.num_free == len(free), "free blocks are miscounted"
        assert self._cached.keys() >= self._kept.keys(), "a block that is kept is blank"
        assert self._cached.keys().isdisjoint(self._blank), "a blank block is cached"
        assert {name: block for block, (name, _, _) in self._cached.items()} == self._index
