"""A picture of a run: what each request does over the steps, above the use of blocks.

Requests stand from top to bottom in order of arrival, one bar each, coloured by phase. The lower
axis is virtual time, the upper one counts the steps that all workers have ended by then. Below, the
share of blocks in use on each worker (of many workers the mean and the range), and how many
requests wait or are swapped. Drawn are the requests whose phases the log has kept.

matplotlib is imported when a picture is drawn; it is among the development packages.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_svc.sim.runlog import Phase, RequestLog, RunLog, StepLog

COLORS = {
    Phase.WAITING: "#d0d0d0",
    Phase.PREFILL: "#1f77b4",
    Phase.DECODE: "#2ca02c",
    Phase.SWAPPED: "#ff7f0e",
    Phase.PREEMPTED: "#d62728",
}
# A picture of more lines than pixels says nothing.
MAX_REQUESTS = 400
MAX_WORKERS = 8
NUM_STEP_TICKS = 8
_BINS = 400


class TimelineError(Exception):
    """No picture can be drawn; the text says why."""


def write(path: Path, log: RunLog, title: str) -> None:
    """Draws the run as a PNG. Raises TimelineError without matplotlib, or with nothing to draw."""
    drawn = [of for of in log.requests if of.spans]
    drawn = sorted(drawn, key=lambda of: (of.arrived_s, of.index))[:MAX_REQUESTS]
    if not drawn or not log.steps:
        raise TimelineError("the run has no steps, or kept no phases of requests")
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise TimelineError(
            "pictures need matplotlib, which is among the development packages: "
            "pip install -r requirements-dev.lock"
        ) from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    height = min(14.0, 2.5 + 0.09 * len(drawn))
    figure, (above, below) = plt.subplots(
        2,
        1,
        figsize=(13, height + 2.5),
        height_ratios=(height, 2.5),
        sharex=True,
        layout="constrained",
    )
    end_s = max(span.end_s for of in drawn for span in of.spans)
    _requests(above, drawn)
    _step_numbers(above, log, end_s)
    _blocks(below, log, end_s)
    below.set_xlabel("virtual time, s")
    below.set_xlim(0.0, end_s)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _requests(axis: Any, drawn: Sequence[RequestLog]) -> None:
    from matplotlib.patches import Patch

    for place, of in enumerate(drawn):
        for phase, color in COLORS.items():
            bars = [(s.begin_s, s.end_s - s.begin_s) for s in of.spans if s.phase is phase]
            if bars:
                axis.broken_barh(bars, (place - 0.42, 0.84), facecolors=color)
    axis.set_ylim(len(drawn) - 0.5, -0.5)
    axis.set_ylabel("requests, by arrival")
    handles = [Patch(color=color, label=phase.value) for phase, color in COLORS.items()]
    axis.legend(handles=handles, loc="upper right", ncols=len(handles), fontsize=8, frameon=True)
    axis.grid(True, axis="x", alpha=0.25)


def _step_numbers(axis: Any, log: RunLog, end_s: float) -> None:
    """An upper axis with the number of steps ended; those kept are thinned evenly."""
    ends = np.sort(np.array([step.end_s for step in log.steps]))
    per_kept = log.num_steps / len(ends)
    ticks = np.linspace(0.0, end_s, NUM_STEP_TICKS)
    numbers = np.searchsorted(ends, ticks, side="right") * per_kept
    upper = axis.twiny()
    upper.set_xlim(0.0, end_s)
    upper.set_xticks(ticks, [f"{number:,.0f}" for number in numbers])
    upper.tick_params(labelsize=8)
    upper.set_xlabel("steps ended, all workers", fontsize=9)


def _blocks(axis: Any, log: RunLog, end_s: float) -> None:
    by_worker: dict[str, list[StepLog]] = {}
    for step in sorted(log.steps, key=lambda step: step.end_s):
        if step.end_s <= end_s:
            by_worker.setdefault(step.worker, []).append(step)
    if len(by_worker) <= MAX_WORKERS:
        for worker, steps in sorted(by_worker.items()):
            share = [step.num_blocks_used / log.num_blocks for step in steps]
            axis.plot(
                [step.end_s for step in steps], share, drawstyle="steps-post", lw=1, label=worker
            )
        axis.legend(loc="upper left", fontsize=8, frameon=False, ncols=4)
    else:
        times = np.linspace(0.0, end_s, _BINS)
        use = np.array([_held(steps, times) for steps in by_worker.values()]) / log.num_blocks
        axis.plot(times, use.mean(axis=0), color="#1f77b4", lw=1.2, label="mean of the workers")
        axis.fill_between(
            times, use.min(axis=0), use.max(axis=0), color="#1f77b4", alpha=0.2, label="range"
        )
        axis.legend(loc="upper left", fontsize=8, frameon=False)
    axis.set_ylim(0.0, 1.05)
    axis.set_ylabel("blocks in use")
    axis.grid(True, alpha=0.25)
    steps = [step for step in log.steps if step.end_s <= end_s]
    steps.sort(key=lambda step: step.end_s)
    others = axis.twinx()
    ends = [step.end_s for step in steps]
    others.plot(
        ends, [step.num_waiting for step in steps], color="#7f7f7f", lw=0.8, label="waiting"
    )
    others.plot(
        ends,
        [step.num_swapped for step in steps],
        color=COLORS[Phase.SWAPPED],
        lw=0.8,
        label="swapped",
    )
    others.set_ylim(bottom=0)
    others.set_ylabel("requests")
    others.legend(loc="upper right", fontsize=8, frameon=False)


def _held(steps: Sequence[StepLog], times: Any) -> Any:
    """Blocks in use at each of the times: as the last step before it left them, 0 before any."""
    ends = np.array([step.end_s for step in steps])
    used = np.array([0, *(step.num_blocks_used for step in steps)])
    return used[np.searchsorted(ends, times, side="right")]
