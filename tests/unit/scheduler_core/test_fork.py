"""Samples of one prompt: forks, what they share, what they copy, and when there is no fork."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.account import Wait
from scheduler_svc.core.events import RequestArrived
from scheduler_svc.core.types import FinishReason, PrefixStop, RequestId, WorkerId
from tests.builders import expected_output, make_core, make_request
from tests.cluster import Cluster

SIZE = 4
DEPTHS = [1, 2, 4, 8]
EDGES = range(1, 3 * SIZE + 2)
GROUP = b"samples of one p"
WORKER: dict[str, Any] = {
    "block_size": SIZE,
    "num_blocks": 200,
    "num_slots": 16,
    "max_num_batched_tokens": 256,
}


def cluster(depth: int = 2, *, worker: dict[str, int] | None = None, **config: Any) -> Cluster:
    c = Cluster(make_core(max_inflight_steps=depth, **config))
    c.begin(**(WORKER | (worker or {})))
    return c


def sample(index: int, **fields: Any) -> RequestArrived:
    """Sample `index` of a prompt, s0, s1 and so on."""
    given = {"family": 1, "sample_group": GROUP, "prompt": 66, "max_tokens": 12, **fields}
    return make_request(f"s{index}", sample_index=index, **given)


def samples(count: int, **fields: Any) -> list[RequestArrived]:
    return [sample(index, **fields) for index in range(count)]


def assert_right(c: Cluster, *arrivals: RequestArrived) -> None:
    """All have what they would have alone, and nothing is left."""
    for arrival in arrivals:
        name = arrival.request_id.decode()
        assert (c.output(name), c.end(name)) == expected_output(arrival)
    c.assert_idle()


def num_cached(c: Cluster, count: int) -> list[int]:
    return [c.finish(f"s{index}").num_cached_tokens for index in range(count)]


def num_blocks_used(c: Cluster) -> int:
    return sum(worker.num_blocks_used for worker in c.core.view().workers)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("prompt", EDGES)
def test_one_that_comes_later_computes_the_last_token_only(
    prompt: int, depth: int, caching: bool
) -> None:
    """At every place of the prompt's end in a block; one token alone has nothing in common."""
    c = cluster(depth, enable_prefix_caching=caching)
    arrivals = samples(3, prompt=prompt, max_tokens=3 * SIZE + depth)
    c.arrive(arrivals[0])
    c.steps(2)
    c.arrive_together(*arrivals[1:])
    c.run()
    assert_right(c, *arrivals)
    stats = c.core.stats
    assert num_cached(c, 3) == [0, prompt - 1, prompt - 1]
    assert stats.num_forks == (2 if prompt > 1 else 0)
    assert stats.num_copied_blocks == (2 if (prompt - 1) % SIZE else 0)
    assert stats.num_prompt_tokens == prompt + 2


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("chunk", [0, 7])
def test_samples_that_come_together_hold_the_prompt_once(
    depth: int, chunk: int, caching: bool
) -> None:
    c = cluster(depth, enable_prefix_caching=caching, prefill_chunk_tokens=chunk)
    arrivals = samples(4)
    c.arrive_together(*arrivals)
    most = 0
    while any(worker.plans for worker in c.workers.values()):
        c.step()
        most = max(most, num_blocks_used(c))
    assert_right(c, *arrivals)
    # 16 whole blocks of the prompt, and what each has from token 65 on: 13 tokens and no more.
    assert most <= 16 + 4 * 4
    assert num_cached(c, 4)[0] == 0
    assert min(num_cached(c, 4)[1:]) >= 64


def test_a_fork_waits_for_the_result_and_for_no_more() -> None:
    """A worker may leave out rows of a source that it knows to have ended."""
    c = cluster(depth=4)
    c.arrive_together(*samples(2))
    plans = [(len(plan.admits), plan.num_steps) for plan in c.last.plans]
    assert plans == [(1, 1), (0, 3)]
    c.step()
    (plan,) = c.last.plans
    assert [admit.num_computed_tokens for admit in plan.admits] == [65]


def test_a_source_that_its_worker_has_left_out_is_not_forked_from() -> None:
    c = cluster(depth=2, prefill_chunk_tokens=40)
    arrivals = samples(3)
    c.arrive_together(*arrivals)
    c.workers[next(iter(c.workers))].cancel(RequestId(b"s0"))
    c.step()
    c.workers[next(iter(c.workers))].cancel(RequestId(b"s0"))
    c.gateway.streams[RequestId(b"s0")].end = FinishReason.CANCELLED
    c.run()
    assert_right(c, *arrivals[1:])
    assert num_cached(c, 3)[1] < 65


def test_source_and_forks_write_blocks_of_their_own() -> None:
    """Each goes on through the block that was partly full, whoever is ahead."""
    c = cluster(depth=2)
    arrivals = samples(5, prompt=SIZE + 2, max_tokens=20)
    for arrival in arrivals:
        c.arrive(arrival)
        c.steps(3)
    c.run()
    assert_right(c, *arrivals)
    assert (c.core.stats.num_forks, c.core.stats.num_copied_blocks) == (4, 4)


@pytest.mark.parametrize("how", ["cancelled", "failed", "lost", "superseded"])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_when_the_first_goes_the_next_one_is_the_source(how: str, num_steps: int) -> None:
    """Before its prompt has returned, just after, and after the forks' first step."""
    c = cluster(depth=2, prefill_chunk_tokens=40)
    arrivals = samples(4)
    c.arrive_together(*arrivals)
    c.steps(num_steps + 1)
    if how == "cancelled":
        c.cancel("s0")
    elif how == "superseded":
        c.supersede("s0")
    elif how == "failed":
        c.step(fail=True)
    else:
        c.lose("w")
        c.begin(**WORKER)
    c.run()
    assert_right(c, *(arrivals if how != "cancelled" else arrivals[1:]))
    assert c.core.stats.num_forks > 0


def test_one_with_output_of_its_own_is_a_request_like_any_other() -> None:
    c = cluster()
    c.arrive(sample(0))
    c.steps(3)
    c.arrive(sample(1, outputs=2))
    c.run()
    assert_right(c, sample(0), sample(1))
    assert c.core.stats.num_forks == 0


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": 65},
        {"family": 2},
        {"cache_salt": b"another"},
        {"sample_group": b"another group of"},
        {"sample_group": b""},
    ],
)
def test_only_samples_of_one_group_prompt_and_salt_are_forked(other: dict[str, Any]) -> None:
    c = cluster()
    arrivals = [sample(0), sample(1, **other)]
    c.arrive_together(*arrivals)
    c.run()
    assert_right(c, *arrivals)
    assert c.core.stats.num_forks == 0


def test_logprobs_of_the_output_can_be_had_by_a_fork_those_of_the_prompt_can_not() -> None:
    for prompt_logprobs in (False, True):
        c = cluster()
        arrivals = samples(3, num_logprobs=1, prompt_logprobs=prompt_logprobs)
        c.arrive_together(*arrivals)
        c.run()
        assert_right(c, *arrivals)
        assert c.core.stats.num_forks == (0 if prompt_logprobs else 2)


@pytest.mark.parametrize("config", [{"hold_back_tokens": 0}, {"max_holds": 0}])
def test_waiting_can_be_turned_off(config: dict[str, Any]) -> None:
    c = cluster(**config)
    c.arrive_together(*samples(3, prompt=20))
    assert len(c.last.plans[0].admits) == 3


def test_a_static_batch_has_no_forks() -> None:
    c = cluster(scheduling_policy="static", static_batch_size=2)
    arrivals = samples(4)
    c.arrive_together(*arrivals)
    c.run()
    assert_right(c, *arrivals)
    assert (c.core.stats.num_forks, c.core.stats.num_held_back) == (0, 0)


def test_a_sample_waits_in_a_bounded_number_of_plans() -> None:
    c = cluster(max_holds=3, prefill_chunk_tokens=8)
    arrivals = samples(2, prompt=200)
    c.arrive_together(*arrivals)
    c.run()
    assert_right(c, *arrivals)
    assert 0 < num_cached(c, 2)[1] < 199
    assert c.core.stats.num_forks == 0


def test_prompts_without_a_whole_block_to_share_are_not_waited_for() -> None:
    c = cluster()
    c.arrive_together(*samples(3, prompt=SIZE))
    assert len(c.last.plans[0].admits) == 3


def test_a_prompt_that_the_cache_holds_is_not_waited_for() -> None:
    c = cluster()
    c.arrive(make_request("before", prompt=64, family=1, max_tokens=1))
    c.run()
    c.arrive_together(*samples(3, prompt=67))
    assert [len(plan.admits) for plan in c.last.plans] == [3, 0]
    assert [admit.num_computed_tokens for admit in c.last.plans[0].admits] == [64] * 3


def test_forks_of_a_prompt_that_the_cache_holds_whole_begin_with_their_source() -> None:
    c = cluster()
    c.arrive(make_request("before", prompt=64, family=1, max_tokens=1))
    c.run()
    c.arrive_together(*samples(3, prompt=65))
    assert [(len(plan.admits), plan.num_steps) for plan in c.last.plans] == [(3, 2)]
    assert (c.core.stats.num_forks, c.core.stats.num_copied_blocks) == (2, 0)
    c.run()
    assert_right(c, *samples(3, prompt=65))


def test_without_room_beside_the_source_samples_go_where_there_is_some() -> None:
    c = cluster(worker={"num_slots": 2})
    c.begin("other", **WORKER)
    arrivals = samples(4)
    c.arrive_together(*arrivals)
    assert c.core.stats.num_held_back == 3
    c.run()
    assert_right(c, *arrivals)
    assert all(worker.steps for worker in c.workers.values())
    assert c.core.stats.num_forks >= 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_with_room_all_samples_go_to_the_worker_of_the_first(depth: int) -> None:
    c = cluster(depth)
    c.begin("other", **WORKER)
    arrivals = samples(8)
    c.arrive_together(*arrivals)
    c.run()
    assert_right(c, *arrivals)
    assert c.core.stats.num_forks == 7
    assert sum(bool(worker.steps) for worker in c.workers.values()) == 1


def test_a_worker_that_has_no_turn_is_not_waited_for_without_end() -> None:
    """The source's worker does not answer; the other one has room for plans."""
    c = cluster(max_holds=5)
    c.begin("other", **WORKER)
    c.arrive_together(*samples(2))
    c.advance(1)
    assert not c.workers[WorkerId("other")].plans
    for _ in range(5):
        c.advance(1)
    assert c.workers[WorkerId("other")].plans


def test_a_fork_needs_one_block_above_the_watermark() -> None:
    """17 blocks for the source's 66 tokens; its end takes two more, each sample one at least."""
    for num_blocks, num_forks in ((18, 1), (17, 0)):
        c = cluster(worker={"num_blocks": num_blocks}, watermark=0.0)
        arrivals = samples(2, max_tokens=2)
        c.arrive(arrivals[0])
        c.arrive(arrivals[1])
        c.run()
        assert_right(c, *arrivals)
        assert c.core.stats.num_forks == num_forks


def test_what_is_shared_is_charged_once() -> None:
    """66 tokens, one more for each fork and the output are less than 100; four prompts are not."""
    c = cluster(scheduling_policy="fair", worker={"num_slots": 5})
    arrivals = samples(4, max_tokens=3, tenant="t")
    c.arrive_together(*arrivals, make_request("u1", prompt=100, max_tokens=9, tenant="u"))
    c.step()
    assert c.core.stats.num_forks == 3
    c.arrive_together(make_request("u2", tenant="u"), make_request("t2", tenant="t"))
    c.run()
    first, second = (c.finish(name).first_scheduled_ns or 0 for name in ("t2", "u2"))
    assert first < second


def test_a_fork_makes_no_look_into_the_cache() -> None:
    c = cluster()
    c.arrive_together(*samples(4))
    c.run()
    stats = c.core.stats
    assert (stats.prefix_queries, stats.prefix_hits) == (66, 0)
    assert {stop: n for stop, n in stats.prefix_stops.items() if n} == {PrefixStop.COLD: 1}
    assert c.finish("s1").account.prefix_stop is None
    assert dict(c.finish("s1").account.waited)[Wait.HELD_BACK] > 0


def test_a_fork_names_no_block_anew_and_publishes_none_twice() -> None:
    """Blocks of the prompt are in the index once; a later request finds them all."""
    c = cluster()
    c.arrive_together(*samples(4, prompt=64, max_tokens=5))
    c.run()
    c.arrive(make_request("later", prompt=70, family=1, max_tokens=1))
    c.run()
    assert c.finish("later").num_cached_tokens == 64


def test_the_plan_tells_the_worker_which_sample_it_is() -> None:
    c = cluster()
    c.arrive_together(*samples(3, prompt=3))
    assert [admit.sample_index for admit in c.last.plans[0].admits] == [0, 1, 2]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_blocks", [14, 18, 30])
def test_samples_have_the_tokens_of_separate_requests_when_blocks_are_short(
    depth: int, num_blocks: int
) -> None:
    arrivals = samples(6, prompt=18, max_tokens=20)
    for given in (arrivals, [replace(arrival, sample_group=b"") for arrival in arrivals]):
        c = cluster(depth, worker={"num_blocks": num_blocks}, watermark=0.0)
        c.arrive_together(*given)
        c.run()
        assert_right(c, *given)
        assert (c.core.stats.num_forks > 0) == bool(given[0].sample_group)
        assert c.core.stats.num_preemptions > 0 or num_blocks == 30
