"""Who goes first: classes that age, bounded passing, deadlines, and the gap of running decodes."""

import random
from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.events import StepCompleted
from scheduler_svc.core.step_cost import StepCost
from scheduler_svc.core.types import CostProfile, FinishReason
from tests.builders import make_core, make_request, make_worker
from tests.cluster import MS, Cluster

SECOND = 1000 * MS


def cluster(**config: object) -> Cluster:
    return Cluster(make_core(max_inflight_steps=1, **config))


def admission_order(c: Cluster, names: list[str]) -> list[str]:
    """Runs to the end; who was scheduled first, second..."""
    c.run()
    return sorted(names, key=lambda name: c.finish(name).first_scheduled_ns or 0)


def one_at_a_time(**config: object) -> Cluster:
    """A worker with one slot, taken for a while by a request of the best class."""
    c = cluster(**config)
    c.begin(num_slots=1)
    c.arrive(make_request("runs", max_tokens=20, priority=-100))
    return c


def test_a_class_is_a_head_start() -> None:
    c = one_at_a_time(priority_ageing_ns=10 * SECOND)
    c.arrive(make_request("low", priority=1))
    c.advance(9 * SECOND)
    c.arrive(make_request("passes", priority=0))
    c.advance(2 * SECOND)
    c.arrive(make_request("too late", priority=0))
    assert admission_order(c, ["low", "too late", "passes"]) == ["passes", "low", "too late"]


def test_without_ageing_classes_are_strict() -> None:
    c = one_at_a_time(priority_ageing_ns=0)
    c.arrive(make_request("low", priority=1))
    c.advance(3600 * SECOND)
    c.arrive(make_request("high", priority=0))
    assert admission_order(c, ["low", "high"]) == ["high", "low"]


@pytest.mark.parametrize("seed", range(5))
def test_nobody_starves_behind_better_classes(seed: int) -> None:
    """However many of a better class come, those after the head start do not pass."""
    pick, c = random.Random(seed), cluster(priority_ageing_ns=50 * MS)
    c.begin(num_slots=2)
    c.arrive(make_request("low", priority=2))
    arrived: dict[str, int] = {}
    for i in range(300):
        name = f"r{i}"
        c.arrive(make_request(name, max_tokens=pick.randint(1, 4)))
        arrived[name] = c.now_ns
        c.step()
        if c.end("low") is not None:
            break
    low = c.finish("low")
    passed = [n for n, f in c.finishes.items() if n != "low-1" and f.finished_ns < low.finished_ns]
    assert all(arrived[name.split("-")[0]] <= low.arrived_ns + 100 * MS for name in passed)
    c.run()


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_passed_more_often_than_max_skips(seed: int) -> None:
    """Each admission of a later one while an earlier one waits for room counts."""
    pick = random.Random(seed)
    max_skips = pick.choice((1, 2, 5))
    c = cluster(max_skips=max_skips, watermark=0.0, enable_prefix_caching=False)
    c.begin(num_blocks=10, block_size=4, num_slots=6)
    waiting: dict[str, int] = {}
    for i in range(120):
        if len(waiting) < 12:
            prompt = pick.choice((1, 3, 8, 30, 36))
            c.arrive(make_request(f"r{i}", prompt=prompt, max_tokens=pick.randint(1, 4)))
            waiting[f"r{i}"] = 0
        else:
            c.step()
        for plan in c.last.plans:
            for name in [admit.request_id.decode() for admit in plan.admits]:
                waiting.pop(name, None)
                for other in waiting:
                    if int(other[1:]) < int(name[1:]):
                        waiting[other] += 1
        # Of one plan's admissions the last may come after the bound was reached by the first.
        assert all(count <= max_skips for count in waiting.values())
    c.run()
    assert all(f.reason is FinishReason.LENGTH for f in c.finishes.values())


def test_one_that_can_run_elsewhere_only_holds_nobody_up_here() -> None:
    c = cluster(max_skips=1)
    c.begin("small", num_blocks=4, num_slots=2)
    c.begin("large", num_blocks=40, num_slots=1)
    c.arrive(make_request("runs", prompt=100, max_tokens=40))
    c.arrive(make_request("waits", prompt=100, max_tokens=2))
    for i in range(4):
        c.arrive(make_request(f"s{i}", prompt=3, max_tokens=2))
    c.run(until=lambda: all(c.end(f"s{i}") is not None for i in range(4)))
    assert c.end("runs") is c.end("waits") is None
    c.run()


def with_cost(step_us: float, token_us: float, *, max_gap_ns: int = 0, **options: Any) -> Cluster:
    """A worker of known speed."""
    c = cluster(max_prefill_gap_ns=max_gap_ns)
    c.join_as(replace(make_worker(**options), cost=CostProfile(step_us=step_us, token_us=token_us)))
    c.step()
    return c


def test_one_that_cannot_keep_its_deadline_lets_others_go_first() -> None:
    """20 tokens of 1 ms are more than 15 ms. It is still tried when nobody else wants the slot."""
    c = with_cost(1000.0, 1000.0, num_slots=1)
    c.arrive(make_request("runs", max_tokens=3))
    c.arrive(make_request("late", prompt=20, deadline_ns=c.now_ns + 15 * MS))
    c.arrive(make_request("in time", prompt=2, max_tokens=2, deadline_ns=c.now_ns + 30 * MS))
    c.run()
    assert admission_order(c, ["late", "in time"]) == ["in time", "late"]


def test_min_tokens_count_towards_what_a_deadline_needs() -> None:
    c = with_cost(1000.0, 1.0, num_slots=1)
    c.arrive(make_request("runs", max_tokens=3))
    late: dict[str, Any] = {"max_tokens": 40, "deadline_ns": c.now_ns + 20 * MS}
    c.arrive(make_request("late", min_tokens=40, **late))
    c.arrive(make_request("may stop early", **late))
    c.run(until=lambda: c.row("may stop early") > 0)
    assert c.row("late") == 0


def test_a_late_one_is_answered() -> None:
    c = one_at_a_time()
    c.arrive(make_request("a", deadline_ns=c.now_ns + 5 * MS))
    (finish,) = c.advance(6 * MS).finishes
    assert (finish.reason, finish.notify) == (FinishReason.DEADLINE, True)


def test_chunks_keep_the_gap_of_running_decodes() -> None:
    """2 ms for the step, 0.1 ms a token: of a gap of 5 ms 28 tokens are left beside two decodes."""
    c = with_cost(2000.0, 100.0, max_gap_ns=5 * MS, num_blocks=200, max_num_batched_tokens=256)
    c.arrive(make_request("alone", prompt=100, max_tokens=20))
    c.step()
    assert c.row("alone") == 100, "without decodes there is no gap to keep"
    c.arrive(make_request("second", prompt=1, max_tokens=20))
    c.step()
    c.arrive(make_request("long", prompt=100, max_tokens=2))
    c.steps(3)
    assert (c.row("alone"), c.row("second"), c.row("long")) == (1, 1, 28)
    c.run()


def test_a_prompt_gets_on_however_short_the_gap_is() -> None:
    c = with_cost(2000.0, 100.0, max_gap_ns=1)
    c.arrive(make_request("decodes", prompt=1, max_tokens=30))
    c.step()
    c.arrive(make_request("long", prompt=20, max_tokens=2))
    c.steps(2)
    assert c.row("long") == 4, "a block"
    c.run()


def test_step_times_correct_the_profile() -> None:
    cost = StepCost(CostProfile(step_us=1000.0, token_us=10.0))
    for i in range(400):
        num_tokens = 8 if i % 4 else 200
        cost.observe(num_tokens, 3000 + 40 * num_tokens)
    assert cost.profile.step_us == pytest.approx(3000, rel=0.05)
    assert cost.profile.token_us == pytest.approx(40, rel=0.05)


def test_steps_of_one_size_leave_the_slope_to_the_profile() -> None:
    cost = StepCost(CostProfile(step_us=1000.0, token_us=10.0))
    for _ in range(400):
        cost.observe(8, 3000)
    assert cost.profile.token_us == pytest.approx(10.0)
    assert cost.profile.step_us == pytest.approx(2920.0)


def test_a_step_that_stood_still_is_no_measure() -> None:
    cost = StepCost(CostProfile(step_us=1000.0, token_us=10.0))
    for _ in range(50):
        cost.observe(8, 1080)
    cost.observe(8, 10_000_000)
    cost.observe(8, 0)
    assert cost.profile.step_us < 1200.0


def test_steps_whose_rows_were_skipped_teach_no_cost() -> None:
    """A client leaves beside its long prompt: the step had many tokens and took no time."""
    profile = CostProfile(step_us=5000.0, token_us=20.0)
    core = make_core(max_inflight_steps=1)
    joined = make_worker("w", num_blocks=128, max_num_batched_tokens=512)
    core.feed(replace(joined, cost=profile))
    (worker,) = core._workers.values()
    for number in range(20):
        core.feed(make_request(f"long{number}", prompt=400, max_tokens=1))
        (plan,) = core.take_ready().plans
        rows = [admit.slot for admit in plan.admits]
        core.feed(
            StepCompleted(
                now_ns=number,
                worker_id=plan.worker_id,
                step=plan.step,
                finished=tuple((slot, FinishReason.CANCELLED) for slot in rows),
                num_wasted_rows=len(rows),
                step_us=60,
            )
        )
    assert worker.cost.profile == profile
