"""Prefix sharing in the whole core: duplicates that arrive together, reasons, collisions."""

import random
from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.types import CostProfile, PrefixStop
from tests.builders import expected_output, make_core, make_request, make_worker, token_at
from tests.cluster import Cluster

SIZE = 4


def cluster(depth: int = 1, **config: object) -> Cluster:
    return Cluster(make_core(max_inflight_steps=depth, **config))


def num_cached(c: Cluster, *names: str) -> list[int]:
    return [c.finish(name).num_cached_tokens for name in names]


def stops(c: Cluster) -> dict[PrefixStop, int]:
    """What has been counted."""
    return {stop: count for stop, count in c.core.stats.prefix_stops.items() if count}


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_duplicates_wait_until_the_first_has_filled_the_cache(depth: int) -> None:
    c = cluster(depth)
    c.begin(block_size=SIZE, num_slots=30, num_blocks=500, max_num_batched_tokens=4096)
    names = [f"r{i}" for i in range(20)]
    c.arrive_together(*(make_request(n, prompt=65, family=1, max_tokens=2) for n in names))
    c.run()
    assert num_cached(c, *names) == [0] + [64] * 19
    assert c.core.stats.num_prompt_tokens == 65 + 19
    assert c.core.stats.num_held_back == 19
    for name in names:
        arrival = make_request(name, prompt=65, family=1, max_tokens=2)
        assert (c.output(name), c.end(name)) == expected_output(arrival)


def test_only_the_shared_part_is_waited_for() -> None:
    c = cluster()
    c.begin(block_size=SIZE, num_slots=30, num_blocks=500, max_num_batched_tokens=32)
    system = make_request("s", prompt=40, family=1).prompt_token_ids
    c.arrive_together(
        *(make_request(n, prompt=(*system, *(i * 7 + k for k in range(100)))) for i, n in ENDS)
    )
    c.run()
    assert num_cached(c, "a", "b", "c") == [0, 40, 40]


ENDS = list(enumerate("abc"))


def test_others_are_not_held_up_by_one_that_is_held_back() -> None:
    c = cluster(prefill_chunk_tokens=16)
    c.begin(block_size=SIZE, num_slots=8, num_blocks=500)
    c.arrive_together(
        make_request("first", prompt=64, family=1, max_tokens=1),
        make_request("twin", prompt=64, family=1, max_tokens=1),
        make_request("other", prompt=40, max_tokens=1),
    )
    c.run()
    first, twin, other = (c.finish(n).first_scheduled_ns or 0 for n in ("first", "twin", "other"))
    assert first == other < twin


def test_short_common_beginnings_are_not_waited_for() -> None:
    c = cluster()
    c.begin(block_size=SIZE)
    c.arrive_together(*(make_request(n, prompt=31, family=1, max_tokens=1) for n in "ab"))
    c.run()
    assert num_cached(c, "a", "b") == [0, 0]
    assert c.core.stats.num_held_back == 0


@pytest.mark.parametrize(("step_us", "held"), [(1000.0, 1), (100_000.0, 0)])
def test_a_wait_must_save_more_than_a_step(step_us: float, held: int) -> None:
    """40 tokens of 100 us."""
    c = cluster()
    cost = CostProfile(step_us=step_us, token_us=100.0)
    c.join_as(replace(make_worker(block_size=SIZE), cost=cost))
    c.step()
    c.arrive_together(*(make_request(n, prompt=41, family=1, max_tokens=1) for n in "ab"))
    c.run()
    assert c.core.stats.num_held_back == held


@pytest.mark.parametrize("config", [{"hold_back_tokens": 0}, {"scheduling_policy": "static"}])
def test_holding_back_can_be_turned_off_and_is_with_static(config: dict[str, Any]) -> None:
    c = cluster(**config)
    c.begin(block_size=SIZE, num_blocks=100, max_num_batched_tokens=256)
    c.arrive_together(*(make_request(n, prompt=64, family=1, max_tokens=1) for n in "ab"))
    c.run()
    assert num_cached(c, "a", "b") == [0, 0]


def test_a_request_is_held_back_in_a_bounded_number_of_plans() -> None:
    c = cluster(max_holds=3, prefill_chunk_tokens=8)
    c.begin(block_size=SIZE, num_blocks=200)
    c.arrive_together(*(make_request(n, prompt=200, family=1, max_tokens=1) for n in "ab"))
    c.run()
    # After three more plans it begins with what there is by then.
    assert num_cached(c, "b") == [24]


@pytest.mark.parametrize("how", ["cancelled", "preempted by a failure", "lost with its worker"])
def test_when_the_first_goes_the_next_one_fills(how: str) -> None:
    c = cluster()
    c.begin(block_size=SIZE, num_blocks=100, max_num_batched_tokens=16)
    names = [f"r{i}" for i in range(4)]
    c.arrive_together(*(make_request(n, prompt=65, family=1, max_tokens=2) for n in names))
    c.steps(2)
    if how == "cancelled":
        c.cancel("r0")
    elif how == "lost with its worker":
        c.lose("w")
        c.begin(block_size=SIZE, num_blocks=100, max_num_batched_tokens=16)
    else:
        c.step(fail=True)
    c.run()
    assert all(tokens >= 48 for tokens in num_cached(c, *names[2:]))


def test_a_block_of_output_is_shared_from_the_result_that_filled_it() -> None:
    c = cluster()
    c.begin(block_size=SIZE)
    first = make_request("first", prompt=4, max_tokens=30)
    c.arrive(first)
    # The next result is that of the fourth decode, which fills the second block.
    c.steps(4)
    output = tuple(token_at(first.request_id, i) for i in range(4))
    c.arrive(make_request("next", prompt=(*first.prompt_token_ids, *output, 1), max_tokens=1))
    c.run()
    assert num_cached(c, "next") == [8]


def test_one_without_room_is_looked_at_again_when_more_of_it_can_be_shared() -> None:
    """Eight blocks are free: 14 are too many, but not when seven of them are shared."""
    c = cluster(prefill_chunk_tokens=16, watermark=0.0, hold_back_tokens=0)
    c.begin(block_size=SIZE, num_blocks=18)
    c.arrive(make_request("runs", prompt=40, family=1, max_tokens=30))
    c.arrive(make_request("waits", prompt=56, family=1, max_tokens=2))
    c.steps(3)
    assert c.row("runs") == 8
    c.steps(2)
    assert c.row("waits") > 0
    c.run()


def test_salts_are_not_held_back_for_each_other() -> None:
    c = cluster()
    c.begin(block_size=SIZE, num_blocks=100, max_num_batched_tokens=256)
    c.arrive_together(
        *(make_request(n, prompt=64, family=1, max_tokens=1, cache_salt=n.encode()) for n in "ab")
    )
    assert len(c.last.plans[0].admits) == 2
    c.run()


def test_hits_and_misses_are_counted_with_their_reason() -> None:
    c = cluster()
    c.begin(block_size=SIZE, num_blocks=20)

    def ask(name: str, **options: object) -> None:
        c.arrive(make_request(name, max_tokens=1, **options))  # type: ignore[arg-type]
        c.run()

    ask("cold", prompt=16, family=1)
    ask("hit", prompt=16, family=1)
    ask("part", prompt=24, family=1)
    ask("short", prompt=4, family=1)
    ask("scored", prompt=16, family=1, num_logprobs=0, prompt_logprobs=True)
    assert stops(c) == {
        PrefixStop.COLD: 2,
        PrefixStop.END: 1,
        PrefixStop.SHORT: 1,
        PrefixStop.LOGPROBS: 1,
    }
    assert (c.core.stats.prefix_queries, c.core.stats.prefix_hits) == (76, 12 + 16)
    ask("wipes", prompt=78, family=2)
    ask("again", prompt=16, family=1)
    assert stops(c)[PrefixStop.EVICTED] == 1


def test_what_another_worker_has_more_of_is_counted() -> None:
    c = cluster()
    c.begin("a", block_size=SIZE, num_slots=2)
    c.arrive(make_request("fills", prompt=16, family=1, max_tokens=1))
    c.run()
    c.begin("b", block_size=SIZE, num_slots=8)
    c.arrive(make_request("crowds", prompt=60, family=2, max_tokens=9))
    c.arrive(make_request("elsewhere", prompt=16, family=1, max_tokens=1))
    c.run()
    assert stops(c)[PrefixStop.ELSEWHERE] == 1


def test_without_a_cache_every_look_says_so() -> None:
    c = cluster(enable_prefix_caching=False)
    c.begin(block_size=SIZE)
    c.arrive(make_request("a", prompt=16))
    c.run()
    assert stops(c) == {PrefixStop.OFF: 1}


@pytest.mark.parametrize("seed", range(3))
def test_names_of_eight_bits_never_share_what_differs(seed: int) -> None:
    """Token ids are compared on a hit: the FakeWorker would see another prefix's KV."""
    pick = random.Random(seed)
    c = cluster(2, hash_bytes=1)
    c.begin(block_size=SIZE, num_blocks=400, num_slots=16, max_num_batched_tokens=512)
    arrivals = [
        make_request(f"r{i}", prompt=pick.randint(5, 90), family=pick.randint(0, 30), max_tokens=6)
        for i in range(150)
    ]
    for arrival in arrivals:
        c.arrive(arrival)
        if pick.random() < 0.7:
            c.step()
    c.run()
    for arrival in arrivals:
        name = arrival.request_id.decode()
        assert (c.output(name), c.end(name)) == expected_output(arrival)
    assert stops(c)[PrefixStop.COLLISION] > 10
    assert c.core.stats.prefix_hits > 0


def test_the_tail_of_a_chat_is_evicted_before_its_beginning() -> None:
    c = cluster()
    c.begin(block_size=SIZE, num_blocks=16)
    first = make_request("turn 1", prompt=16, family=1, max_tokens=16)
    c.arrive(first)
    c.run()
    # Its last token was not computed: 7 full blocks are cached, 9 hold nothing; 10 are needed.
    c.arrive(make_request("other", prompt=40, family=2, max_tokens=1))
    c.run()
    output = tuple(token_at(first.request_id, i) for i in range(16))
    turn = (*first.prompt_token_ids, *output, 1)
    c.arrive(make_request("turn 2", prompt=turn, max_tokens=1))
    c.run()
    assert num_cached(c, "turn 2") == [24]
    assert stops(c)[PrefixStop.EVICTED] == 1
