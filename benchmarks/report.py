"""The tables, the JSON and the picture of a serving measurement."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import goals
from benchmarks.floor import Floor
from benchmarks.goals import Verdict
from benchmarks.measure import Point
from benchmarks.stack import ROOT

HEADINGS = (
    "policy", "load", "requests", "out tok/s", "req/s", "TTFT p50 ms", "p99", "gap p50 ms", "p99",
    "E2E p50 s", "p99", "prefix hits",
)  # fmt: skip
STEP_HEADINGS = (
    "policy", "load", "steps", "outside p50 ms", "plan wait", "apply", "sample", "forward",
)  # fmt: skip
FLOOR_HEADINGS = ("the floor", "today", "reference", "unit", "today / reference")
GOAL_HEADINGS = ("goal", "as it is", "factor", "for today", "found", "unit", "verdict")
COLORS = {"fcfs": "#1f77b4", "static": "#d62728"}


def row(point: Point) -> tuple[str, ...]:
    """One line of the table."""
    failed = f" ({point.num_failed} failed)" if point.num_failed else ""
    return (
        point.policy,
        _load(point),
        f"{point.num_requests}{failed}",
        f"{point.output_tokens_per_s:.1f}",
        f"{point.requests_per_s:.2f}",
        f"{point.ttft_p50_ms:.0f}",
        f"{point.ttft_p99_ms:.0f}",
        f"{point.gap_p50_ms:.0f}",
        f"{point.gap_p99_ms:.0f}",
        f"{point.e2e_p50_s:.1f}",
        f"{point.e2e_p99_s:.1f}",
        f"{point.hit_rate:.2%}",
    )


def _load(point: Point) -> str:
    unit = "clients" if point.kind == "closed" else "req/s"
    kinds = f"{', sampled' if point.sampled else ''}{', long prompts' if point.long else ''}"
    return f"{point.kind} {point.level:.3g} {unit}{kinds}"


def table(points: Sequence[Point]) -> str:
    """One line for each load."""
    return markdown(HEADINGS, [row(point) for point in points])


def step_table(points: Sequence[Point]) -> str:
    """Where the workers' steps spend their time, besides the forward; medians in ms."""
    rows = []
    for point in points:
        if (steps := point.steps) is not None:
            parts = (steps.outside_ms, steps.idle_ms, steps.apply_ms, steps.sample_ms)
            rows.append(
                (
                    point.policy,
                    _load(point),
                    f"{steps.num_steps}",
                    *(f"{part:.2f}" for part in parts),
                    f"{steps.forward_ms:.1f}",
                )
            )
    return markdown(STEP_HEADINGS, rows)


def floor_table(floor: Floor) -> str:
    """What the machine can do, beside the machine on which the goals were set."""
    rows = []
    for name, today in goals.probed(floor).items():
        reference = goals.REFERENCE[name]
        share = "-" if today is None else f"{today / reference.value:.2f}"
        found = "-" if today is None else _number(today)
        rows.append((reference.meaning, found, f"{reference.value:g}", reference.unit, share))
    return markdown(FLOOR_HEADINGS, rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def goal_table(verdicts: Sequence[Verdict]) -> str:
    """The goals as they are, for this machine today, and what was found."""
    rows = [
        (
            of.goal.meaning,
            f"{'at least' if of.goal.at_least else 'at most'} {of.goal.value:g}",
            f"{of.factor:.2f}",
            _number(of.scaled),
            "-" if of.found is None else _number(of.found),
            of.goal.unit,
            of.text,
        )
        for of in verdicts
    ]
    return markdown(GOAL_HEADINGS, rows)


def markdown(headings: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table, aligned, so that it can be read and pasted."""
    rows = [headings, *body]
    widths = [max(len(line[i]) for line in rows) for i in range(len(headings))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in rows
    ]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    info: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        info.setdefault(name.strip(), value.strip())
    flags = info.get("flags", "").split()
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "cpu": info.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [flag for flag in wanted if flag in flags],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "commit": commit(),
    }


def commit() -> str:
    """The commit measured, with a mark if files differ from it; empty outside a clone."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def write_json(path: Path, points: Sequence[Point], about: dict[str, Any]) -> None:
    """Everything that was measured."""
    document = {**about, "machine": machine(), "points": [point.as_dict() for point in points]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def write_plot(path: Path, points: Sequence[Point], title: str) -> None:
    """Throughput and latency against concurrency; below, against the rate of arrival. Greedy."""
    import matplotlib as mpl

    points = [point for point in points if not (point.sampled or point.long)]

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    # A single level makes no line.
    kinds = [
        kind
        for kind in ("closed", "poisson")
        if len({p.level for p in points if p.kind == kind}) > 1
    ]
    kinds = kinds or ["closed"]
    figure, axes = plt.subplots(
        len(kinds), 3, figsize=(13, 3.7 * len(kinds) + 0.5), squeeze=False, layout="constrained"
    )
    for kind, line in zip(kinds, axes, strict=True):
        for policy in dict.fromkeys(point.policy for point in points):
            own = sorted(
                (p for p in points if p.kind == kind and p.policy == policy), key=lambda p: p.level
            )
            if own:
                _lines(line, own, policy)
        xlabel = "concurrent clients" if kind == "closed" else "requests arriving per second"
        headings = ("output tokens per second", "time to first token, ms", "gap between tokens, ms")
        for axis, heading in zip(line, headings, strict=True):
            _dress(axis, kind, xlabel, heading, [p.level for p in points if p.kind == kind])
    axes[0][0].legend(loc="best", frameon=False)
    axes[0][1].legend(loc="best", frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lines(line: Any, own: Sequence[Point], policy: str) -> None:
    color = COLORS.get(policy, "#555555")
    x = [point.level for point in own]
    line[0].plot(x, [p.output_tokens_per_s for p in own], "o-", color=color, label=policy)
    for axis, low, high in (
        (line[1], [p.ttft_p50_ms for p in own], [p.ttft_p99_ms for p in own]),
        (line[2], [p.gap_p50_ms for p in own], [p.gap_p99_ms for p in own]),
    ):
        axis.plot(x, low, "o-", color=color, label=f"{policy} p50")
        axis.plot(x, high, "s--", color=color, alpha=0.6, label=f"{policy} p99")


def _dress(axis: Any, kind: str, xlabel: str, heading: str, levels: Sequence[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ticks = sorted(set(levels))
    if kind == "closed":
        axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{level:.3g}" for level in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel(xlabel)
    axis.set_title(heading, fontsize=10)
    if heading.endswith("ms"):
        axis.set_yscale("log")
        plain = FuncFormatter(lambda value, _: f"{value:,.0f}")
        axis.yaxis.set_major_formatter(plain)
        axis.yaxis.set_minor_formatter(plain)
        axis.tick_params(axis="y", which="minor", labelsize=7)
        axis.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    else:
        axis.margins(y=0.15)
        axis.set_ylim(bottom=0)
    axis.grid(True, which="both" if heading.endswith("ms") else "major", alpha=0.25)
