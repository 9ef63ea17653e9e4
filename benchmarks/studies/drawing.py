"""Plots of the studies: small helpers over matplotlib's axes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.study import Row, Study

PALETTE = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b")


def bars(axis: Any, labels: Sequence[str], values: Sequence[float], heading: str) -> None:
    """One bar a run, its number above it."""
    colors = [PALETTE[i % len(PALETTE)] for i in range(len(values))]
    drawn = axis.bar(range(len(values)), values, color=colors, width=0.65)
    axis.bar_label(drawn, fmt=_short, fontsize=8, padding=2)
    _dress(axis, labels, heading)


def paired_bars(
    axis: Any, labels: Sequence[str], series: Mapping[str, Sequence[float]], heading: str
) -> None:
    """Several bars a run, named in a legend."""
    width = 0.8 / max(1, len(series))
    for i, (name, values) in enumerate(series.items()):
        at = [x + (i - (len(series) - 1) / 2) * width for x in range(len(values))]
        drawn = axis.bar(at, values, width=width, color=PALETTE[i % len(PALETTE)], label=name)
        axis.bar_label(drawn, fmt=_short, fontsize=7, padding=2)
    axis.legend(frameon=False, fontsize=8, loc="upper left")
    _dress(axis, labels, heading)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _dress(axis: Any, labels: Sequence[str], heading: str) -> None:
    axis.set_xticks(range(len(labels)), [label.replace(", ", ",\n") for label in labels])
    axis.tick_params(axis="x", labelsize=8)
    axis.set_title(heading, fontsize=10)
    axis.margins(y=0.25)
    axis.set_ylim(bottom=0)
    axis.grid(True, axis="y", alpha=0.25)


def write(path: Path, study: Study, rows: Sequence[Row], note: str) -> None:
    """The study's picture as PNG; `note` says where and of which code."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1, study.num_axes, figsize=(4.6 * study.num_axes, 3.9), squeeze=False, layout="constrained"
    )
    study.draw(axes[0], rows)
    figure.suptitle(f"{study.title}\n{note}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
