"""Swap: what is copied, what is waited for, who comes back when, and when it was in vain."""

from typing import Any

import pytest

from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.ready import Explanation, Preemption
from scheduler_svc.core.types import FinishReason, PreemptionMode, RequestId, WorkerId
from tests.builders import expected_output, make_core, make_request
from tests.cluster import Cluster


def cluster(*, depth: int = 1, worker: dict[str, Any] | None = None, **config: Any) -> Cluster:
    """Six blocks of four, eight host blocks; each preemption swaps unless told otherwise."""
    options = {"preemption_mode": "swap", "watermark": 0.0, "enable_prefix_caching": False}
    c = Cluster(make_core(max_inflight_steps=depth, **(options | config)))
    c.begin(**({"num_blocks": 6, "num_host_blocks": 8} | (worker or {})))
    return c


def crowd(c: Cluster, *names: str, prompt: int = 10, max_tokens: int = 8, **fields: Any) -> None:
    """Requests that do not fit together to their ends."""
    c.arrive_together(
        *(make_request(n, prompt=prompt, max_tokens=max_tokens, **fields) for n in names)
    )


def explain(c: Cluster, name: str) -> Explanation:
    found = c.core.explain(RequestId(name.encode()))
    assert found is not None
    return found


def step_until_preempted(c: Cluster, name: str = "w", **options: Any) -> Preemption:
    """The first preemption."""
    for _ in range(60):
        for plan in c.step(name, **options).plans:
            if plan.preemptions:
                return plan.preemptions[0]
    raise AssertionError("nothing was preempted")


def assert_all_end_well(c: Cluster) -> None:
    assert_all_end_well_but(c)


def assert_all_end_well_but(c: Cluster, *gone: str) -> None:
    c.run()
    for request_id, stream in c.gateway.streams.items():
        if request_id.decode() in gone:
            continue
        assert (stream.tokens, stream.end) == expected_output(stream.arrival)
    c.assert_idle()


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_a_swapped_request_computes_nothing_twice(depth: int) -> None:
    c = cluster(depth=depth)
    crowd(c, "first", "second")
    assert_all_end_well(c)
    assert c.core.stats.preemptions[PreemptionMode.SWAP] == 1
    computed = sum(sum(step.values()) for step in c.workers[WorkerId("w")].steps)
    # Each prompt and each output but the last, once.
    assert computed == 2 * (10 + 8 - 1)


def test_the_plan_says_how_it_went_and_what_either_way_costs() -> None:
    c = cluster(preemption_mode="auto", worker={"token_us": 3.0, "swap_gb_per_s": 1.0})
    crowd(c, "first", "second")
    assert step_until_preempted(c) == Preemption(
        request_id=RequestId(b"second"),
        mode=PreemptionMode.SWAP,
        swap_us=24,
        recompute_us=36,
        num_blocks=3,
    )
    assert c.core.stats.num_blocks_swapped_out == 3


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        ({"prefill_us_per_token_override": 1.0}, PreemptionMode.RECOMPUTE),
        ({"swap_gbps_override": 0.1}, PreemptionMode.RECOMPUTE),
        ({"swap_gbps_override": 0.1, "prefill_us_per_token_override": 30.0}, PreemptionMode.SWAP),
    ],
)
def test_overrides_turn_the_choice(overrides: dict[str, Any], mode: PreemptionMode) -> None:
    c = cluster(preemption_mode="auto", worker={"token_us": 3.0, "swap_gb_per_s": 1.0}, **overrides)
    crowd(c, "first", "second")
    assert step_until_preempted(c).mode is mode
    assert_all_end_well(c)


def test_while_blocks_are_on_their_way_nobody_else_is_preempted() -> None:
    c = cluster(worker={"num_blocks": 9})
    crowd(c, "first", "second", "third")
    step_until_preempted(c, num_done=0)
    # "third" has left three blocks, more than the two that lack one need.
    plan = c.last.plans[0]
    assert [p.request_id for p in plan.preemptions] == [b"third"]
    assert plan.num_rows == 0
    assert c.core.view().num_running == 2
    ready = c.step()
    assert [len(p.growth) for p in ready.plans] == [2]
    assert not ready.plans[0].preemptions
    assert_all_end_well(c)


def test_an_empty_plan_asks_for_what_no_result_has_named() -> None:
    c = cluster(depth=2, worker={"num_blocks": 7})
    crowd(c, "first", "second")
    step_until_preempted(c, num_done=0)
    while c.workers:
        ready = c.step(num_done=0)
        if not c.core.view().workers[0].num_swapped:
            break
        # Something is always on its way as long as an operation is.
        assert ready.plans or c.core.view().workers[0].num_steps_in_flight
    assert_all_end_well(c)


def test_a_request_that_ends_while_it_is_copied_leaves_its_blocks_to_the_copy() -> None:
    c = cluster()
    crowd(c, "first", "second")
    step_until_preempted(c, num_done=0)
    assert explain(c, "second").state is RequestState.SWAPPED
    c.cancel("second")
    (worker,) = c.core.view().workers
    assert (worker.num_swapped, worker.num_host_blocks_used) == (0, 3)
    c.step()
    assert c.core.view().workers[0].num_host_blocks_used == 0
    c.run()
    c.assert_idle()


def test_a_request_that_ends_on_its_way_back_leaves_its_blocks_to_the_copy() -> None:
    c = cluster()
    crowd(c, "first", "second")
    c.run(until=lambda: explain(c, "second").state is RequestState.SWAPPING_IN)
    c.cancel("second")
    (worker,) = c.core.view().workers
    assert (worker.num_blocks_used, worker.num_host_blocks_used) == (0, 3)
    c.step()
    c.assert_idle()


def test_it_is_seated_only_after_the_copy_back_is_done() -> None:
    c = cluster()
    crowd(c, "first", "second")
    c.run(until=lambda: explain(c, "second").state is RequestState.SWAPPING_IN)
    assert not any(plan.admits for plan in c.last.plans)
    assert explain(c, "second").num_computed_tokens == 12
    (admit,) = (admit for plan in c.step().plans for admit in plan.admits)
    assert (admit.request_id, admit.num_computed_tokens) == (b"second", 12)
    assert_all_end_well(c)


def test_a_client_that_left_ends_its_swapped_request() -> None:
    """The worker knows it before the core and leaves out a chunk that is under way."""
    c = cluster(depth=2, prefill_chunk_tokens=2, worker={"num_blocks": 8})
    crowd(c, "first", prompt=3, max_tokens=20)
    crowd(c, "second", prompt=24, max_tokens=2)
    assert step_until_preempted(c).mode is PreemptionMode.SWAP
    c.workers[WorkerId("w")].cancel(RequestId(b"second"))
    c.run(until=lambda: explain(c, "second").finish is not None)
    assert c.finish("second").reason is FinishReason.CANCELLED
    assert_all_end_well_but(c, "second")


def test_a_failed_step_makes_void_what_it_did_not_name() -> None:
    c = cluster()
    crowd(c, "first", "second")
    step_until_preempted(c)
    c.step(fail=True, num_done=0)
    assert (c.core.stats.num_swaps_void, c.core.view().num_swapped) == (1, 0)
    assert_all_end_well(c)


def test_a_failed_step_keeps_a_swap_that_is_done() -> None:
    c = cluster()
    crowd(c, "first", "second")
    step_until_preempted(c)
    c.step(fail=True)
    assert (c.core.stats.num_swaps_void, c.core.view().num_swapped) == (0, 1)
    assert_all_end_well(c)


def test_shared_blocks_are_not_copied_and_found_again() -> None:
    c = cluster(enable_prefix_caching=True, hold_back_tokens=4, worker={"num_blocks": 7})
    crowd(c, "first", "second", prompt=9, max_tokens=12, family=1)
    preempted = step_until_preempted(c)
    # Of its blocks the first two are those of the prompt, which "first" has as well.
    assert preempted.num_blocks == c.core.stats.num_blocks_swapped_out == 2
    assert_all_end_well(c)
    assert c.core.stats.num_swaps_void == 0


def test_what_the_cache_still_has_is_not_copied_back() -> None:
    c = cluster(enable_prefix_caching=True)
    crowd(c, "first", "second")
    step_until_preempted(c)
    c.cancel("first")
    assert_all_end_well_but(c, "first")
    assert (c.core.stats.num_blocks_swapped_out, c.core.stats.num_blocks_swapped_in) == (3, 0)


def test_nothing_that_comes_later_is_admitted_before_it_is_back() -> None:
    c = cluster(worker={"num_blocks": 7})
    crowd(c, "first", "second", max_tokens=14)
    step_until_preempted(c)
    c.arrive(make_request("tiny", prompt=1, max_tokens=1))
    c.run(until=lambda: c.end("tiny") is not None)
    assert c.end("first") is not None
    assert explain(c, "second").state is not RequestState.SWAPPED


def test_one_of_a_better_class_goes_before_it() -> None:
    c = cluster(worker={"num_blocks": 7})
    crowd(c, "first", "second", max_tokens=14)
    step_until_preempted(c)
    c.arrive(make_request("tiny", prompt=1, max_tokens=1, priority=-1))
    c.run(until=lambda: c.end("tiny") is not None)
    assert explain(c, "second").state is RequestState.SWAPPED


def test_another_worker_with_room_comes_first() -> None:
    c = cluster()
    crowd(c, "first", "second")
    c.begin("other", num_blocks=6, num_host_blocks=8)
    assert step_until_preempted(c).mode is PreemptionMode.MOVE
    assert explain(c, "second").state is RequestState.RUNNING
    assert explain(c, "second").worker_id == "other"
    assert_all_end_well(c)


def test_a_lost_worker_takes_its_host_blocks_with_it() -> None:
    c = cluster()
    crowd(c, "first", "second")
    step_until_preempted(c)
    c.step()
    c.begin("other")
    c.lose("w")
    assert c.core.view().num_swapped == 0
    assert_all_end_well(c)


@pytest.mark.parametrize("num_host_blocks", [0, 2])
def test_without_host_blocks_it_is_computed_anew(num_host_blocks: int) -> None:
    c = cluster(worker={"num_host_blocks": num_host_blocks})
    crowd(c, "first", "second")
    assert step_until_preempted(c).mode is PreemptionMode.RECOMPUTE
    assert_all_end_well(c)


def test_what_a_client_is_still_to_get_of_a_prompt_is_computed_anew() -> None:
    c = cluster(prefill_chunk_tokens=4, worker={"num_blocks": 7})
    crowd(c, "first", prompt=3, max_tokens=20)
    crowd(c, "second", prompt=24, max_tokens=2, num_logprobs=0, prompt_logprobs=True)
    assert step_until_preempted(c).mode is PreemptionMode.RECOMPUTE
    assert_all_end_well(c)


def test_the_account_tells_swaps_apart() -> None:
    c = cluster()
    crowd(c, "first", "second")
    c.run()
    finish = c.finish("second")
    assert (finish.num_preemptions, finish.account.num_swaps) == (1, 1)
