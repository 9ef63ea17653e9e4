"""What a run of the load came to: figures, a table of several runs, JSON."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_svc.sim import fairness
from scheduler_svc.sim.fairness import Fairness, Limits
from scheduler_svc.sim.runlog import RunLog

HEADINGS = (
    "run", "requests", "out tok/s", "req/s", "TTFT p50 ms", "p90", "p99", "gap p50 ms", "p99",
    "E2E p50 s", "p99", "preempted", "hits", "blocks", "served most / least", "lead / bound",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of what was measured; 0 where nothing was."""

    p50: float
    p90: float
    p99: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures of one run. Times are virtual seconds; only core_cpu_s is of the real clock.

    Throughput is over the whole run, from its begin to its last event. num_unfinished are requests
    that had no end when the run had one. hit_rate is the share of the prompt tokens asked of the
    prefix caches that they had; blocks_used the mean share of all blocks that was in use, by time.
    """

    num_workers: int
    num_requests: int
    num_unfinished: int
    finishes: Mapping[str, int]
    duration_s: float
    num_steps: int
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_s: Percentiles
    token_gap_s: Percentiles
    e2e_s: Percentiles
    preemptions: Mapping[str, int]
    hit_rate: float
    blocks_used: float
    step_s: float
    rows_per_step: float
    core_cpu_s: float
    plans_per_core_s: float
    fairness: Fairness

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarize(log: RunLog, limits: Limits | None = None) -> Report:
    """The figures of a run; with `limits` those of fairness have their bound."""
    ended = [of for of in log.requests if of.finished_s is not None]
    ttfts = [of.first_token_s - of.arrived_s for of in log.requests if of.first_token_s is not None]
    e2es = [of.finished_s - of.arrived_s for of in ended if of.finished_s is not None]
    output_tokens = sum(of.num_output_tokens for of in log.requests)
    busy_s = sum(step.duration_s for step in log.steps)
    num_kept = max(1, len(log.steps))
    gaps = log.token_gaps
    return Report(
        num_workers=log.num_workers,
        num_requests=len(log.requests),
        num_unfinished=len(log.requests) - len(ended),
        finishes=dict(sorted(Counter(of.finish_reason for of in ended).items())),
        duration_s=log.duration_s,
        num_steps=log.num_steps,
        prompt_tokens=sum(of.num_prompt_tokens for of in log.requests),
        output_tokens=output_tokens,
        output_tokens_per_s=_ratio(output_tokens, log.duration_s),
        requests_per_s=_ratio(len(ended), log.duration_s),
        ttft_s=_percentiles(ttfts),
        token_gap_s=Percentiles(
            p50=gaps.percentile(50),
            p90=gaps.percentile(90),
            p99=gaps.percentile(99),
            largest=gaps.max_s,
        ),
        e2e_s=_percentiles(e2es),
        preemptions=dict(sorted(log.preemptions.items())),
        hit_rate=_ratio(log.prefix_hits, log.prefix_queries),
        blocks_used=_ratio(
            sum(step.num_blocks_used * step.duration_s for step in log.steps),
            busy_s * log.num_blocks,
        ),
        step_s=busy_s / num_kept,
        rows_per_step=sum(s.num_prefill_rows + s.num_decode_rows for s in log.steps) / num_kept,
        core_cpu_s=log.core_cpu_s,
        plans_per_core_s=_ratio(log.num_steps, log.core_cpu_s),
        fairness=fairness.measure(log, limits),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else 0.0


def _percentiles(values: Sequence[float]) -> Percentiles:
    if not values:
        return Percentiles(p50=0.0, p90=0.0, p99=0.0, largest=0.0)
    p50, p90, p99, largest = np.percentile(values, (50, 90, 99, 100)).tolist()
    return Percentiles(p50=p50, p90=p90, p99=p99, largest=largest)


def row(name: str, of: Report) -> tuple[str, ...]:
    """A run's line of the table."""
    unfinished = f" ({of.num_unfinished} open)" if of.num_unfinished else ""
    preempted = ", ".join(f"{count} {mode}" for mode, count in of.preemptions.items() if count)
    fair = of.fairness
    ratio = "-" if fair.service_ratio is None else f"{fair.service_ratio:.2f}"
    lead = "-" if fair.bound is None else f"{fair.largest_lead:,.0f} / {fair.bound:,.0f}"
    return (
        name,
        f"{of.num_requests:,}{unfinished}",
        f"{of.output_tokens_per_s:,.0f}",
        f"{of.requests_per_s:.3g}",
        _ms(of.ttft_s.p50),
        _ms(of.ttft_s.p90),
        _ms(of.ttft_s.p99),
        _ms(of.token_gap_s.p50),
        _ms(of.token_gap_s.p99),
        f"{of.e2e_s.p50:.3g}",
        f"{of.e2e_s.p99:.3g}",
        preempted or "0",
        f"{of.hit_rate:.1%}",
        f"{of.blocks_used:.0%}",
        ratio,
        lead,
    )


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(reports: Mapping[str, Report]) -> str:
    """One line a run, aligned, so that it can be read and pasted."""
    rows = [HEADINGS, *(row(name, of) for name, of in reports.items())]
    widths = [max(len(line[i]) for line in rows) for i in range(len(HEADINGS))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in rows
    ]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def write_json(path: Path, reports: Mapping[str, Report], about: Mapping[str, Any]) -> None:
    """All figures of all runs; `about` says how they came about."""
    document = {**about, "runs": {name: of.as_dict() for name, of in reports.items()}}
    text = json.dumps(document, indent=1, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
