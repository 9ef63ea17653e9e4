"""What caches of a size could give at most, held against every way to keep a few blocks."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation import cache_bound
from benchmarks.simulation.cache_bound import Access
from scheduler_svc.sim.arrivals import Arrival

BLOCK = 512


def whole(*ids: int) -> Access:
    return Access(ids=ids, tokens=[BLOCK] * len(ids), block_tokens=BLOCK)


def most_of_all(trace: Sequence[Access], num_blocks: int) -> int:
    """Every choice of what to keep after each request, blocks that were just used included."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for access in trace:
        found: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            gained = hits + BLOCK * sum(name in kept for name in access.ids)
            for chosen in subsets(sorted(kept.union(access.ids)), num_blocks):
                found[chosen] = max(found.get(chosen, 0), gained)
        states = found
    return max(states.values())


def subsets(names: Sequence[int], most: int) -> list[frozenset[int]]:
    found = [frozenset[int]()]
    for name in names:
        found += [known | {name} for known in found if len(known) < most]
    return found


# A chain of ids: each id stands for all before it, so a tree of them.
PATHS = st.sampled_from([(0,), (0, 1), (0, 1, 2), (0, 3), (4,), (4, 5)])


@given(st.lists(PATHS, max_size=8), st.integers(0, 3))
def test_the_best_is_what_trying_all_finds(paths: list[tuple[int, ...]], num_blocks: int) -> None:
    trace = [whole(*path) for path in paths]
    assert cache_bound.best(trace, num_blocks) == most_of_all(trace, num_blocks)


@given(st.lists(PATHS, max_size=30), st.integers(0, 6))
def test_no_cache_has_more_than_the_best_and_that_no_more_than_one_without_a_limit(
    paths: list[tuple[int, ...]], num_blocks: int
) -> None:
    trace = [whole(*path) for path in paths]
    best = cache_bound.best(trace, num_blocks)
    assert cache_bound.least_recently_used(trace, num_blocks) <= best
    assert best <= cache_bound.unlimited(trace) == cache_bound.best(trace, 6)


def test_last_use_drops_tails_first_and_counts_up_to_the_first_gap() -> None:
    trace = [whole(0, 1, 2), whole(3), whole(0, 1, 2), whole(0, 1, 2)]
    # The second request takes the place of block 2, the third one block 3's.
    assert cache_bound.least_recently_used(trace, 3) == (2 + 3) * BLOCK


def test_a_part_of_a_block_counts_its_tokens_and_takes_no_place() -> None:
    arrivals = [Arrival(0.0, BLOCK + 100, 1, prefix_ids=(0, 1)) for _ in range(2)]
    trace = cache_bound.accesses(arrivals, BLOCK)
    assert trace[0].tokens == [BLOCK, 100]
    assert cache_bound.unlimited(trace) == BLOCK + 100
    assert cache_bound.best(trace, 1) == BLOCK + 100
    assert cache_bound.best(trace, 0) == 100


def test_what_is_behind_the_last_id_is_nobody_elses() -> None:
    arrivals = [Arrival(0.0, 3 * BLOCK, 1, prefix_ids=(0,)) for _ in range(2)]
    assert cache_bound.unlimited(cache_bound.accesses(arrivals, BLOCK)) == BLOCK
