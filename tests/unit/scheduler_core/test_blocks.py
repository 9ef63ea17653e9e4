"""BlockPool: allocation, sharing, eviction; beside a brute-force model that keeps plain lists."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.types import BlockHash, BlockId

START = BlockHash(b"start")


def name(label: str) -> BlockHash:
    return BlockHash(label.encode())


def publish_chain(pool: BlockPool, blocks: Sequence[BlockId], labels: str) -> None:
    """Publishes blocks as one chain; the tokens of a block are its label."""
    parent = START
    for block, label in zip(blocks, labels, strict=True):
        pool.publish([(block, (name(label), parent, label.encode()))])
        parent = name(label)


def hits(pool: BlockPool, labels: str) -> list[BlockId]:
    return pool.match([name(x) for x in labels], START, lambda index: labels[index].encode()).blocks


def take(pool: BlockPool, count: int) -> list[BlockId]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def test_allocates_each_block_once() -> None:
    pool = BlockPool(4)
    assert sorted(take(pool, 3) + take(pool, 1)) == [0, 1, 2, 3]
    assert (pool.num_free, pool.num_used) == (0, 4)


def test_too_few_free_blocks_change_nothing() -> None:
    pool = BlockPool(4)
    take(pool, 2)
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    assert pool.allocate(0) == []


def test_a_block_freed_twice_is_a_bug() -> None:
    pool = BlockPool(2)
    blocks = take(pool, 1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(blocks)


def test_sharing_a_free_block_that_is_not_cached_is_a_bug() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="neither owned nor cached"):
        pool.share([BlockId(0)])


def test_a_block_that_is_owned_can_be_shared_before_it_is_cached() -> None:
    pool = BlockPool(2)
    blocks = take(pool, 1)
    assert not pool.is_shared(blocks[0])
    pool.share(blocks)
    assert pool.is_shared(blocks[0])
    pool.check([blocks, blocks])
    pool.release(blocks)
    pool.check([blocks])
    assert not pool.is_shared(blocks[0])
    pool.release(blocks)
    assert pool.num_free == 2


def test_publishing_without_an_owner_is_a_bug() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="without an owner"):
        publish_chain(pool, [BlockId(0)], "a")


def test_a_free_cached_block_is_hit_and_leaves_the_free_list() -> None:
    pool = BlockPool(4)
    blocks = take(pool, 2)
    publish_chain(pool, blocks, "ab")
    pool.release(blocks)
    assert pool.num_free == 4
    assert hits(pool, "abc") == blocks
    assert pool.num_free_among(blocks) == 2
    pool.share(blocks)
    assert pool.num_free == 2
    assert not set(take(pool, 2)) & set(blocks)


def test_a_hit_ends_at_the_first_miss() -> None:
    pool = BlockPool(4)
    blocks = take(pool, 3)
    publish_chain(pool, blocks, "abc")
    assert hits(pool, "axc") == blocks[:1]
    assert hits(pool, "xbc") == []


def test_an_equal_name_with_other_tokens_or_another_parent_is_a_miss() -> None:
    """A hash collision never shares KV."""
    pool = BlockPool(4)
    blocks = take(pool, 2)
    publish_chain(pool, blocks, "ab")
    names = [name("a"), name("b")]

    def match(start: BlockHash, *tokens: bytes) -> list[BlockId]:
        return pool.match(names[: len(tokens)], start, lambda index: tokens[index]).blocks

    assert match(START, b"a", b"b") == blocks
    assert match(START, b"a", b"other") == blocks[:1]
    assert match(START, b"other", b"b") == []
    assert match(BlockHash(b"another salt"), b"a", b"b") == []
    assert pool.match(names[1:], START, lambda _: b"b").blocks == []


def test_a_shared_block_is_freed_by_its_last_owner() -> None:
    pool = BlockPool(2)
    blocks = take(pool, 1)
    publish_chain(pool, blocks, "a")
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_used == 1
    pool.release(blocks)
    assert pool.num_used == 0


def test_blocks_without_a_name_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, plain = take(pool, 2), take(pool, 2)
    publish_chain(pool, cached, "ab")
    pool.release(cached)
    pool.release(plain)
    assert set(take(pool, 2)) == set(plain)
    assert pool.num_cached == 2


def test_the_oldest_chain_is_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(6)
    old, new = take(pool, 3), take(pool, 3)
    publish_chain(pool, old, "abc")
    publish_chain(pool, new, "xyz")
    pool.release(old)
    pool.release(new)
    for labels, left in (("abc", 2), ("abc", 1), ("abc", 0), ("xyz", 2), ("xyz", 1)):
        take(pool, 1)
        assert len(hits(pool, labels)) == left
    assert pool.num_cached == 1


def test_a_hit_makes_a_chain_young_again() -> None:
    pool = BlockPool(4)
    old, new = take(pool, 2), take(pool, 2)
    publish_chain(pool, old, "ab")
    publish_chain(pool, new, "xy")
    pool.release(old)
    pool.release(new)
    pool.share(old)
    pool.release(old)
    take(pool, 2)
    assert len(hits(pool, "ab")) == 2
    assert len(hits(pool, "xy")) == 0


def test_the_first_block_of_a_name_keeps_it() -> None:
    pool = BlockPool(3)
    first, second = take(pool, 1), take(pool, 1)
    publish_chain(pool, first, "a")
    publish_chain(pool, second, "a")
    assert hits(pool, "a") == first
    assert pool.num_cached == 1


class PoolModel(RuleBasedStateMachine):
    """The pool beside a model: owners as lists, cached free blocks as a list in order of age."""

    NUM_BLOCKS = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS)
        self.tables: list[list[BlockId]] = []
        self.index: dict[str, BlockId] = {}
        self.aged: list[BlockId] = []

    def owned(self) -> set[BlockId]:
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        plain = set(range(self.NUM_BLOCKS)) - self.owned() - set(self.aged)
        if count > len(plain) + len(self.aged):
            assert blocks is None
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        evicted = self.aged[: max(0, count - len(plain))]
        assert {b for b in blocks if b not in plain} == set(evicted)
        del self.aged[: len(evicted)]
        self.index = {k: b for k, b in self.index.items() if b not in evicted}
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        cached = set(self.index.values())
        self.aged += [b for b in reversed(table) if b in cached and b not in self.owned()]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), label=st.sampled_from("abcd"))
    def publish(self, data: st.DataObject, label: str) -> None:
        table = data.draw(st.sampled_from(self.tables))
        free = [block for block in table if block not in self.index.values()]
        if free:
            publish_chain(self.pool, free[:1], label)
            self.index.setdefault(label, free[0])

    @rule(label=st.sampled_from("abcd"))
    def hit(self, label: str) -> None:
        found = hits(self.pool, label)
        assert found == ([self.index[label]] if label in self.index else [])
        if found and all(found[0] not in table for table in self.tables):
            assert self.pool.num_free_among(found) == 1
        if found:
            self.pool.share(found)
            self.tables.append(found)
            self.aged = [block for block in self.aged if block not in found]

    @invariant()
    def agrees(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.num_used == len(self.owned())
        assert self.pool.num_cached == len(self.index)


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
