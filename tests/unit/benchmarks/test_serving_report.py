"""What `make bench` makes of its figures: medians out of buckets, goals scaled by the floor."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from benchmarks import goals, report, serving
from benchmarks.floor import Floor
from benchmarks.goals import Goal, Verdict
from benchmarks.measure import Load, Point
from benchmarks.profile import __main__ as profile
from benchmarks.stack import Metrics
from benchmarks.steps import StepCounts, StepTimes, quantile
from benchmarks.studies import __main__ as studies

INF = float("inf")
FLOOR = Floor(
    dtype="fp32",
    threads=2,
    native=True,
    read_gb_per_s=14.8,
    copy_gb_per_s=27.5,
    linear_ms={"1": 30.0, "8": 40.0, "32": 70.0},
    head_ms={"1": 9.4, "8": 8.6, "32": 10.2},
    attention_gb_per_s={"torch": 0.5, "native": 9.0},
    ceiling_ms={"linear layers": 100.0, "head": 40.0, "keys and values": 20.0},
)
POINT = Point(
    policy="fcfs", kind="closed", level=32, sampled=False, num_requests=64, num_failed=0,
    took_s=10.0, prompt_tokens=8000, output_tokens=1200, output_tokens_per_s=120.0,
    requests_per_s=1.0, ttft_p50_ms=100.0, ttft_p99_ms=200.0, gap_p50_ms=50.0, gap_p99_ms=90.0,
    e2e_p50_s=3.0, e2e_p99_s=4.0, cached_tokens=0, prefix_queries=8000.0, prefix_hits=0.0,
    preemptions=0.0, problems=(),
    steps=StepTimes(num_steps=200, outside_ms=4.5, idle_ms=1.0, apply_ms=1.0, sample_ms=1.0,
                    forward_ms=100.0),
)  # fmt: skip


def scrape(**outside: int) -> Metrics:
    """A worker's metrics in which every part of a step has the same times."""
    lines = ["# TYPE quire:worker_step_outside_forward_seconds histogram"]
    bounds = {"le4": "0.004", "le8": "0.008", "all": "+Inf"}
    lines += [
        f'quire:worker_step_outside_forward_seconds_bucket{{le="{bounds[name]}"}} {count}.0'
        for name, count in outside.items()
    ]
    lines.append("# TYPE quire:worker_step_seconds histogram")
    lines += [
        f'quire:worker_step_seconds_bucket{{le="{bounds[name]}",part="{part}"}} {count}.0'
        for part in ("idle", "apply", "sample", "forward")
        for name, count in outside.items()
    ]
    return Metrics("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ({1.0: 0, 2.0: 10, INF: 10}, 0.5, 1.5),
        ({1.0: 4, 2.0: 8, INF: 8}, 0.5, 1.0),
        ({1.0: 4, 2.0: 8, INF: 8}, 0.75, 1.5),
        ({1.0: 0, 2.0: 1, INF: 10}, 0.5, 2.0),
        ({1.0: 0, INF: 0}, 0.5, 0.0),
    ],
)
def test_a_quantile_lies_within_its_bucket(
    buckets: dict[float, float], share: float, expected: float
) -> None:
    assert quantile(buckets, share) == pytest.approx(expected)


def test_steps_are_those_of_the_load_on_all_workers() -> None:
    before = StepCounts.of([scrape(le4=50, le8=50, all=50), scrape(le4=0, le8=0, all=0)])
    after = StepCounts.of([scrape(le4=50, le8=60, all=60), scrape(le4=0, le8=30, all=30)])
    times = StepTimes.of(after.since(before))
    assert times.num_steps == 40
    assert times.outside_ms == pytest.approx(6.0)
    assert times.sample_ms == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("goal", "scaled"),
    [
        (goals.THROUGHPUT, 460.0 * 40.1 / 80.2),
        (goals.GAP_MANY_P99, 150.0 * 80.2 / 40.1),
        (goals.GAP, 20.0 * 39.4 / 19.7),
        (goals.ATTENTION, 7.5),
        (goals.CEILING, 0.7),
        (goals.OUTSIDE, 4.0),
        (goals.OUTSIDE_SAMPLED, 8.0),
    ],
)
def test_a_goal_moves_as_what_bounds_it_does(goal: Goal, scaled: float) -> None:
    """A floor half as good asks for half the rate, or twice the time."""
    verdict = Verdict(goal=goal, factor=goals.factor(goal, FLOOR), found=None)
    assert verdict.scaled == pytest.approx(scaled)


def test_verdicts_are_by_the_scaled_goals() -> None:
    alone = dataclasses.replace(POINT, level=1, gap_p50_ms=70.0)
    other = dataclasses.replace(POINT, policy="static", output_tokens_per_s=1.0)
    long = dataclasses.replace(POINT, long=True, output_tokens_per_s=76.0)
    eight = dataclasses.replace(alone, policy="fcfs, int8", gap_p50_ms=21.0)
    found = goals.verdicts(FLOOR, [other, eight, long, POINT, alone], "fcfs")
    assert {of.goal.meaning: (of.found, of.text) for of in found} == {
        goals.THROUGHPUT.meaning: (120.0, "missed"),
        goals.CEILING.meaning: (0.6, "missed"),
        goals.THROUGHPUT_LONG.meaning: (76.0, "met"),
        goals.GAP_MANY.meaning: (50.0, "met"),
        goals.GAP_MANY_P99.meaning: (90.0, "met"),
        goals.GAP.meaning: (70.0, "missed"),
        goals.GAP_QUANTIZED.meaning: (21.0, "met"),
        goals.FIRST.meaning: (100.0, "met"),
        goals.ATTENTION.meaning: (9.0, "met"),
        goals.OUTSIDE.meaning: (4.5, "missed"),
        goals.OUTSIDE_SAMPLED.meaning: (None, "not measured"),
    }


def test_the_ceiling_is_a_batch_by_the_time_of_all_its_parts() -> None:
    assert FLOOR.ceiling_tok_per_s == pytest.approx(32 / 0.160)


@pytest.mark.parametrize("main", [serving.parse, profile.parse, studies.parse])
@pytest.mark.parametrize("pair", ["X", "QUIRE_X", "X=1"])
def test_a_setting_that_is_none_is_refused_by_name(
    main: Callable[[Sequence[str]], Any], pair: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--set", "QUIRE_X=a=b"]).set == ["QUIRE_X=a=b"]
    with pytest.raises(SystemExit):
        main(["--set", pair])
    assert f"{pair}: must be QUIRE_NAME=VALUE" in capsys.readouterr().err


def test_every_table_has_a_line_for_each_thing() -> None:
    sampled = dataclasses.replace(POINT, sampled=True)
    without = dataclasses.replace(POINT, steps=None)
    found = goals.verdicts(FLOOR, [POINT, sampled], "fcfs")
    long = dataclasses.replace(POINT, long=True)
    table = report.table([POINT, sampled, long])
    assert "closed 32 clients, sampled" in table
    assert "closed 32 clients, long prompts" in table
    assert report.step_table([POINT, without]).count("\n") == 2
    assert report.floor_table(FLOOR).count("\n") == 1 + len(goals.REFERENCE)
    assert report.goal_table(found).count("\n") == 1 + len(found)


def test_the_price_of_deterministic_arithmetic_is_against_the_same_load() -> None:
    alone = dataclasses.replace(POINT, level=1, output_tokens_per_s=40.0)
    again = dataclasses.replace(POINT, policy="fcfs, deterministic", output_tokens_per_s=90.0)
    (line,) = serving.price([alone, POINT, again], "fcfs")
    assert "32 at a time: 0.75 of the tokens/s, 1.00 of the median gap" in line


def test_sampled_loads_have_a_seed_for_each_request() -> None:
    load = Load(kind="closed", level=32, num_requests=64)
    (sampled,) = serving.sampled_loads([load, dataclasses.replace(load, level=8)])
    assert load.settings(3) == {}
    assert sampled.settings(3) == {"temperature": 0.8, "top_p": 0.95, "seed": 3}


def test_long_prompts_are_sent_once_a_client() -> None:
    loads = [Load(kind="closed", level=level, num_requests=64) for level in (8, 32)]
    (long,) = serving.long_loads(loads)
    assert (long.level, long.num_requests, long.label) == (32, 32, "closed 32 long")
    assert serving.LONG.prompt == (256, 768)


@pytest.mark.parametrize(
    ("arguments", "requests"),
    [([], [4, 32, 128, 128]), (["--quick"], [1, 32]), (["--concurrency", "2", "33"], [8, 66])],
)
def test_clients_send_several_requests_each(arguments: list[str], requests: list[int]) -> None:
    loads = serving.closed_loads(serving.parse(arguments))
    assert [load.num_requests for load in loads] == requests
