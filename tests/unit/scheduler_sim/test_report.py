"""What is said of a run: figures, table, JSON, fairness, and the picture."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.sim import fairness, report, timeline
from scheduler_svc.sim.fairness import Limits
from scheduler_svc.sim.runlog import Phase, RequestLog, RunLog, Span, StepLog


def request(index: int, **changes: Any) -> RequestLog:
    """Comes at its index, its first token 1 s later, its end 3 s later; 10 tokens in and out."""
    values: dict[str, Any] = {
        "index": index,
        "tenant": "a",
        "worker": "w0",
        "arrived_s": float(index),
        "num_prompt_tokens": 10,
        "num_output_tokens": 10,
        "first_token_s": index + 1.0,
        "finished_s": index + 3.0,
        "finish_reason": "length",
        **changes,
    }
    return RequestLog(**values)


def step(end_s: float, used: int, worker: str = "w0") -> StepLog:
    """A second of one decode and one chunk."""
    return StepLog(
        end_s=end_s,
        worker=worker,
        duration_s=1.0,
        num_prefill_rows=1,
        num_decode_rows=1,
        num_prefill_tokens=10,
        num_swapped=0,
        num_waiting=1,
        num_blocks_used=used,
    )


def run(*requests: RequestLog, **changes: Any) -> RunLog:
    """A run of 10 s on one worker of 100 blocks."""
    values = {"num_workers": 1, "num_blocks": 100, "block_size": 16, "duration_s": 10.0, **changes}
    log = RunLog(**values)
    log.requests += requests
    for of in requests:
        tokens = of.num_prompt_tokens + of.num_output_tokens
        log.tokens_by_tenant[of.tenant] = log.tokens_by_tenant.get(of.tenant, 0) + tokens
    return log


def test_throughput_is_over_the_whole_run() -> None:
    """Tokens count of those who did not end, too; requests do not."""
    found = report.summarize(
        run(request(0), request(1), request(2, finished_s=None, num_output_tokens=5))
    )
    assert found.output_tokens_per_s == 2.5
    assert found.requests_per_s == 0.2
    assert (found.num_requests, found.num_unfinished) == (3, 1)
    assert found.finishes == {"length": 2}


def test_percentiles_are_of_the_requests() -> None:
    """Times to the first token from 1 to 101 s; one has none and counts in neither."""
    requests = [request(i, first_token_s=2.0 * i + 1, finished_s=2.0 * i + 2) for i in range(101)]
    requests.append(request(101, first_token_s=None, finished_s=None))
    found = report.summarize(run(*requests))
    assert found.ttft_s == report.Percentiles(p50=51.0, p90=91.0, p99=100.0, largest=101.0)
    assert found.e2e_s.p50 == 52.0


def test_gaps_preemptions_hits_and_blocks() -> None:
    """As the log counted them; blocks are weighed by how long a step took."""
    log = run(
        request(0),
        prefix_queries=400,
        prefix_hits=100,
        preemptions={"swap": 2, "recompute": 1},
        core_cpu_s=0.5,
    )
    for _ in range(98):
        log.token_gaps.add(0.05)
    log.token_gaps.add(2.0, 2)
    log.step(step(1.0, 20))
    log.step(step(2.0, 60))
    found = report.summarize(log)
    assert found.token_gap_s.p50 == pytest.approx(0.05, rel=0.1)
    assert found.token_gap_s.p99 == pytest.approx(2.0, rel=0.1)
    assert found.token_gap_s.largest == 2.0
    assert found.preemptions == {"recompute": 1, "swap": 2}
    assert found.hit_rate == 0.25
    assert found.blocks_used == pytest.approx(0.4)
    assert found.rows_per_step == 2.0
    assert found.plans_per_core_s == 4.0


def test_a_run_of_nothing_has_figures() -> None:
    """All of them 0."""
    found = report.summarize(RunLog(num_workers=1, num_blocks=1, block_size=16))
    assert found.output_tokens_per_s == found.hit_rate == found.ttft_s.p99 == 0.0
    assert found.fairness.service_ratio is None
    assert "nothing" in report.table({"nothing": found})


def test_the_table_has_a_line_for_each_run() -> None:
    """Under the headings, as wide as they are."""
    reports = {name: report.summarize(run(request(0))) for name in ("one worker", "four")}
    lines = report.table(reports).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert lines[2].startswith("| one worker")
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert dict(zip(report.HEADINGS, cells, strict=True))["TTFT p50 ms"] == "1,000"


def test_json_holds_all_figures(tmp_path: Path) -> None:
    """And how they came about."""
    path = tmp_path / "folder" / "run.json"
    found = report.summarize(run(request(0)))
    report.write_json(path, {"one": found}, {"command": "python -m scheduler_svc.sim"})
    document = json.loads(path.read_text())
    assert document["command"] == "python -m scheduler_svc.sim"
    assert document["runs"]["one"] == json.loads(json.dumps(found.as_dict()))
    assert document["runs"]["one"]["ttft_s"]["p50"] == 1.0


# Fairness


def test_the_ratio_is_by_weight() -> None:
    """A tenant of weight 2 that got twice as much got the same."""
    log = run(request(0), request(1), request(2, tenant="b"))
    assert fairness.measure(log).service_ratio == 2.0
    limits = Limits(max_model_len=100, num_slots=2, weights={"a": 2.0})
    assert fairness.measure(log, limits).service_ratio == 1.0


def test_one_tenant_has_nobody_to_lead() -> None:
    """No ratio, no lead."""
    found = fairness.measure(run(request(0), request(1)))
    assert (found.num_tenants, found.service_ratio, found.largest_lead) == (1, None, 0.0)


def test_a_lead_counts_while_both_wait() -> None:
    """a is served 120 tokens from 1 s to 5 s; it has more that waits until 8 s, and so has b."""
    log = run(
        request(0, num_prompt_tokens=100, num_output_tokens=20, first_token_s=1.0, finished_s=5.0),
        request(1, arrived_s=0.0, first_token_s=8.0, finished_s=8.0, num_output_tokens=0),
        request(2, tenant="b", arrived_s=0.0, first_token_s=9.0, finished_s=9.0),
    )
    assert fairness.measure(log).largest_lead == pytest.approx(120.0)


def test_no_lead_counts_while_one_of_them_does_not_wait() -> None:
    """b came when a had been served."""
    log = run(
        request(0, num_prompt_tokens=100, first_token_s=1.0, finished_s=5.0),
        request(1, tenant="b", arrived_s=5.0, first_token_s=9.0, finished_s=9.0),
    )
    assert fairness.measure(log).largest_lead == 0.0


def test_cached_tokens_are_no_service() -> None:
    """They cost the others nothing."""
    common = {"arrived_s": 0.0, "finished_s": 9.0, "num_output_tokens": 0}
    log = run(
        request(0, first_token_s=1.0, num_prompt_tokens=100, num_cached_tokens=96, **common),
        request(1, first_token_s=8.0, num_prompt_tokens=1, **common),
        request(2, first_token_s=7.0, num_prompt_tokens=1, tenant="b", **common),
    )
    assert fairness.measure(log).largest_lead == pytest.approx(4.0)


def test_a_lead_shrinks_when_the_other_is_served() -> None:
    """By turns of 50 the difference never passes 50."""
    requests = [
        request(
            2 * turn + side,
            tenant="ab"[side],
            arrived_s=0.0,
            first_token_s=float(2 * turn + side + 1),
            finished_s=float(2 * turn + side + 1),
            num_prompt_tokens=50,
            num_output_tokens=0,
        )
        for turn in range(10)
        for side in range(2)
    ]
    assert fairness.measure(run(*requests, duration_s=30.0)).largest_lead == pytest.approx(50.0)


def test_the_bound_is_that_of_the_document() -> None:
    """2 U, U = L + (P + S x (T + k)) / w, with the smaller weight."""
    limits = Limits(
        max_model_len=1_000, num_slots=4, max_inflight_steps=2, weights={"b": 0.5, "c": 0.1}
    )
    log = run(request(0, num_prompt_tokens=300), request(1, tenant="b", num_output_tokens=30))
    assert fairness.measure(log, limits).bound == 2 * (1_000 + (300 + 4 * (30 + 2)) / 0.5)
    assert fairness.measure(log).bound is None


# The picture


def drawn(num_workers: int) -> RunLog:
    """A run with every phase."""
    log = run(request(0), request(1), num_workers=num_workers)
    for of in log.requests:
        of.spans += [
            Span(phase=phase, begin_s=at + of.arrived_s, end_s=at + of.arrived_s + 1.0)
            for at, phase in enumerate(Phase)
        ]
    for at in range(1, 8):
        for worker in range(num_workers):
            log.step(step(float(at), 10 * at, f"w{worker}"))
    return log


@pytest.mark.parametrize("num_workers", [1, 12])
def test_a_run_is_drawn(tmp_path: Path, num_workers: int) -> None:
    """As a PNG with every phase's colour in it."""
    from matplotlib import image

    path = tmp_path / "folder" / "run.png"
    timeline.write(path, drawn(num_workers), "A run")
    pixels = image.imread(path)[:, :, :3]
    for phase, color in timeline.COLORS.items():
        wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        same = (abs(pixels - wanted) < 0.01).all(axis=2)
        # More than the legend's patch.
        assert same.sum() > 2_000, phase


def test_a_run_without_phases_is_not_drawn(tmp_path: Path) -> None:
    """And leaves no file."""
    path = tmp_path / "run.png"
    with pytest.raises(timeline.TimelineError, match="no steps"):
        timeline.write(path, run(request(0)), "A run")
    assert not path.exists()


def test_without_matplotlib_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The services' images have none."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(timeline.TimelineError, match=r"requirements-dev\.lock"):
        timeline.write(tmp_path / "run.png", drawn(1), "A run")
