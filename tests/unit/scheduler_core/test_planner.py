"""What goes into a step: decodes, chunks, admissions; budgets, blocks and order."""

import pytest

from scheduler_svc.core.types import FinishReason
from tests.builders import expected_output, make_core, make_request
from tests.cluster import Cluster


def cluster(depth: int = 1, **config: object) -> Cluster:
    return Cluster(make_core(max_inflight_steps=depth, **config))


def test_decodes_go_before_prefill_chunks() -> None:
    c = cluster()
    c.begin(max_num_batched_tokens=8)
    c.arrive(make_request("old", prompt=4, max_tokens=8))
    c.step()
    c.arrive(make_request("new", prompt=20, max_tokens=2))
    c.steps(2)
    assert (c.row("old"), c.row("new")) == (1, 7)
    c.steps(1)
    assert (c.row("old"), c.row("new")) == (1, 7)
    c.steps(1)
    assert (c.row("old"), c.row("new")) == (1, 6)


def test_a_running_prefill_goes_before_an_admission() -> None:
    c = cluster()
    c.begin(max_num_batched_tokens=8)
    c.arrive(make_request("first", prompt=12, max_tokens=1))
    c.arrive(make_request("second", prompt=12, max_tokens=1))
    c.step()
    assert (c.row("first"), c.row("second")) == (8, 0)
    c.step()
    assert (c.row("first"), c.row("second")) == (4, 4)
    assert c.finish("first").reason is FinishReason.LENGTH


@pytest.mark.parametrize("prompt", [7, 8, 9, 16, 17])
def test_a_prompt_is_cut_at_the_token_budget(prompt: int) -> None:
    c = cluster()
    worker = c.begin(max_num_batched_tokens=8)
    c.arrive(make_request("a", prompt=prompt, max_tokens=1))
    c.run()
    sizes = [sum(step.values()) for step in worker.steps]
    assert sizes == [8] * (prompt // 8) + ([prompt % 8] if prompt % 8 else [])
    assert c.core.stats.num_chunked_prefills == len(sizes) - 1


def test_two_prompts_that_just_fit_the_budget_share_a_step() -> None:
    c = cluster()
    worker = c.begin(max_num_batched_tokens=8)
    c.arrive_together(
        make_request("a", prompt=3, max_tokens=1), make_request("b", prompt=5, max_tokens=1)
    )
    c.run()
    assert [sorted(step.values()) for step in worker.steps] == [[3, 5]]


def test_the_chunk_limit_cuts_one_request_and_leaves_budget_to_others() -> None:
    c = cluster(prefill_chunk_tokens=4)
    worker = c.begin(max_num_batched_tokens=16)
    c.arrive(make_request("a", prompt=10, max_tokens=1))
    c.arrive(make_request("b", prompt=10, max_tokens=1))
    c.run()
    assert max(max(step.values()) for step in worker.steps) == 4
    assert [sorted(step.values()) for step in worker.steps] == [[4], [4, 4], [2, 4], [2]]


def test_the_configuration_caps_the_workers_budget() -> None:
    c = cluster(max_num_batched_tokens=6)
    worker = c.begin(max_num_batched_tokens=64)
    c.arrive(make_request("a", prompt=15, max_tokens=1))
    c.run()
    assert [sum(step.values()) for step in worker.steps] == [6, 6, 3]


def test_decodes_beyond_the_budget_wait_for_a_later_step() -> None:
    c = cluster()
    worker = c.begin(max_num_batched_tokens=2)
    for name in "abc":
        c.arrive(make_request(name, prompt=1, max_tokens=4))
    c.run()
    assert all(sum(step.values()) <= 2 for step in worker.steps)
    for name in "abc":
        assert c.output(name) == expected_output(make_request(name, max_tokens=4))[0]


def test_max_num_seqs_caps_running_requests() -> None:
    c = cluster(max_num_seqs=3)
    worker = c.begin(num_slots=8)
    for i in range(6):
        c.arrive(make_request(f"r{i}", max_tokens=5))
    c.run()
    assert max(len(step) for step in worker.steps) == 3
    assert len(c.finishes) == 6


def test_slots_cap_running_requests() -> None:
    c = cluster(depth=4)
    worker = c.begin(num_slots=2)
    for i in range(5):
        c.arrive(make_request(f"r{i}", max_tokens=5))
    c.run()
    assert max(len(step) for step in worker.steps) == 2
    assert len(c.finishes) == 5


@pytest.mark.parametrize(("num_blocks", "admitted"), [(5, True), (6, False)])
def test_an_admission_leaves_the_watermark_free(num_blocks: int, admitted: bool) -> None:
    """Of 20 blocks 4 must stay free while others run."""
    c = cluster(watermark=0.2)
    c.begin(num_blocks=20, block_size=4)
    c.arrive(make_request("runs", prompt=42, max_tokens=30))
    c.step()
    c.arrive(make_request("a", prompt=4 * num_blocks, max_tokens=2))
    c.steps(2)
    # 11 blocks are used: 9 are free.
    assert c.row("a") == (4 * num_blocks if admitted else 0)
    c.run()
    assert all(f.reason is FinishReason.LENGTH for f in c.finishes.values())


def test_an_idle_worker_needs_no_watermark() -> None:
    c = cluster(watermark=0.2)
    c.begin(num_blocks=20, block_size=4)
    c.arrive(make_request("alone", prompt=79, max_tokens=2))
    c.run()
    assert c.end("alone") is FinishReason.LENGTH


def test_one_that_does_not_fit_is_passed_a_bounded_number_of_times() -> None:
    c = cluster(max_skips=3, enable_prefix_caching=False)
    c.begin(num_blocks=10, block_size=4, num_slots=8)
    c.arrive(make_request("long", prompt=12, max_tokens=12))
    c.step()
    c.arrive(make_request("big", prompt=36, max_tokens=2))
    for i in range(8):
        c.arrive(make_request(f"small{i}", prompt=1, max_tokens=2))
    passed = 0
    while c.end("big") is None:
        c.step()
        if c.row("big"):
            passed = sum(c.end(f"small{i}") is not None for i in range(8))
            break
    assert passed == 3
    c.run()
    assert len(c.finishes) == 10


def test_a_short_one_passes_a_big_one_that_does_not_fit_yet() -> None:
    c = cluster()
    c.begin(num_blocks=10, block_size=4)
    c.arrive(make_request("long", prompt=16, max_tokens=20))
    c.arrive(make_request("big", prompt=36, max_tokens=2))
    c.arrive(make_request("small", prompt=2, max_tokens=2))
    c.run(until=lambda: c.end("small") is not None)
    assert c.end("big") is c.end("long") is None
    c.run()
    assert len(c.finishes) == 3


def tight(depth: int = 1) -> Cluster:
    """Two requests that both fit at first and then need one block more than there is."""
    c = cluster(depth, watermark=0.0, enable_prefix_caching=False)
    c.begin(num_blocks=6, block_size=4)
    c.arrive_together(
        make_request("first", prompt=10, max_tokens=8),
        make_request("second", prompt=10, max_tokens=8),
    )
    return c


def test_a_missing_block_is_taken_from_the_last_in_rank() -> None:
    c = tight()
    c.run()
    assert c.finish("first").num_preemptions == 0
    assert c.finish("second").num_preemptions >= 1
    for name in ("first", "second"):
        arrival = make_request(name, prompt=10, max_tokens=8)
        assert (c.output(name), c.end(name)) == expected_output(arrival)


def test_priority_decides_who_is_preempted() -> None:
    c = cluster(watermark=0.0, enable_prefix_caching=False)
    c.begin(num_blocks=6, block_size=4)
    c.arrive(make_request("first", prompt=10, max_tokens=8, priority=1))
    c.arrive(make_request("second", prompt=10, max_tokens=8, priority=0))
    c.run()
    assert c.finish("first").num_preemptions >= 1
    assert c.finish("second").num_preemptions == 0


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    c = tight()
    c.run(until=lambda: c.core.stats.num_preemptions == 0 and c.core.view().num_running == 2)
    # It would fit into the blocks that the preemption frees.
    c.arrive(make_request("tiny", prompt=1, max_tokens=1))
    while c.core.stats.num_preemptions == 0:
        assert not any(admit.request_id == b"tiny" for p in c.last.plans for admit in p.admits)
        ready = c.step()
    assert [plan.admits for plan in ready.plans] == [()]
    c.run()
    assert len(c.finishes) == 3


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_a_preempted_request_is_not_admitted_before_its_steps_return(depth: int) -> None:
    c = tight(depth)
    seen_returning = False
    while len(c.finishes) < 2:
        c.step()
        view = c.core.view()
        in_flight = sum(w.num_steps_in_flight for w in view.workers)
        seen_returning |= bool(c.core.stats.num_preemptions) and in_flight > 0
    assert seen_returning
    assert c.finish("second").num_preemptions >= 1
    # The same session: no new attempt, and nothing is emitted twice.
    assert c.finish("second").attempt == 1
    assert c.gateway.num_repeats == 0
    assert c.output("second") == expected_output(make_request("second", max_tokens=8))[0]


def test_static_runs_a_batch_to_its_end() -> None:
    c = cluster(scheduling_policy="static", static_batch_size=3)
    worker = c.begin(num_slots=8)
    c.arrive_together(*(make_request(f"r{i}", prompt=2, max_tokens=2 + i) for i in range(7)))
    c.run()
    assert [len(step) for step in worker.steps] == ([3, 3, 2, 1] + [3, 3, 3, 3, 3, 2, 1] + [1] * 8)


def test_a_static_batch_is_full_though_its_prompts_exceed_one_steps_budget() -> None:
    c = cluster(scheduling_policy="static", static_batch_size=4)
    c.begin(num_slots=8, max_num_batched_tokens=16)
    c.arrive_together(*(make_request(f"r{i}", prompt=12, max_tokens=20) for i in range(6)))
    assert len(c.last.plans[0].admits) == 4
    c.steps(6)
    assert [c.row(f"r{i}") for i in range(6)] == [1, 1, 1, 1, 0, 0]
    c.run()
    assert len(c.finishes) == 6


def test_a_prefix_hit_skips_full_blocks_and_leaves_a_token_to_compute() -> None:
    c = cluster()
    c.begin(block_size=4)
    for name, prompt in (("a", 12), ("b", 12), ("c", 13), ("d", 11)):
        c.arrive(make_request(name, prompt=prompt, family=1, max_tokens=1))
        c.run()
    cached = [c.finish(name).num_cached_tokens for name in "abcd"]
    assert cached == [0, 8, 12, 8]
    assert (c.core.stats.prefix_queries, c.core.stats.prefix_hits) == (48, 28)


def test_a_block_is_shared_only_after_the_result_that_filled_it() -> None:
    c = cluster(depth=2)
    c.begin(block_size=4)
    c.arrive_together(*(make_request(n, prompt=12, family=1, max_tokens=4) for n in "ab"))
    c.step()
    c.arrive(make_request("c", prompt=12, family=1, max_tokens=4))
    c.run()
    assert [c.finish(name).num_cached_tokens for name in "abc"] == [0, 0, 8]


def test_salts_never_share() -> None:
    c = cluster()
    c.begin(block_size=4)
    for name, salt in (("a", b"x"), ("b", b"y"), ("c", b""), ("d", b"x")):
        c.arrive(make_request(name, prompt=12, family=1, max_tokens=1, cache_salt=salt))
        c.run()
    assert [c.finish(name).num_cached_tokens for name in "abcd"] == [0, 0, 0, 8]


def test_without_prefix_caching_nothing_is_shared() -> None:
    c = cluster(enable_prefix_caching=False)
    c.begin(block_size=4)
    for name in "ab":
        c.arrive(make_request(name, prompt=12, family=1, max_tokens=1))
        c.run()
    assert c.finish("b").num_cached_tokens == 0


def test_an_output_is_a_prefix_too() -> None:
    c = cluster()
    c.begin(block_size=4)
    first = make_request("a", prompt=4, family=1, max_tokens=9)
    c.arrive(first)
    c.run()
    turn = (*first.prompt_token_ids, *c.output("a"), 1, 2, 3)
    c.arrive(make_request("b", prompt=turn, max_tokens=1))
    c.run()
    assert c.finish("b").num_cached_tokens == 12


def test_an_idle_core_plans_nothing_and_needs_no_waking() -> None:
    c = cluster()
    assert c.round().wake_at_ns is None
    c.join()
    # A worker that joins is told to start from nothing, once.
    assert [(p.reset, p.num_rows) for p in c.last.plans] == [(True, 0)]
    c.step()
    assert c.round() == type(c.last)()


def test_plans_are_differences() -> None:
    c = cluster()
    c.begin(block_size=16)
    (plan,) = c.arrive(make_request("a", prompt=4, max_tokens=6)).plans
    assert (len(plan.admits), plan.changed) == (1, ((0, 4),))
    (plan,) = c.step().plans
    assert (plan.admits, plan.changed) == ((), ((0, 1),))
    (plan,) = c.step().plans
    assert (plan.admits, plan.changed, plan.growth, plan.releases) == ((), (), (), ())
    assert plan.num_rows == plan.num_scheduled_tokens == 1
