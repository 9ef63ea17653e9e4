"""What the comparison leaves: JSON, and its part of the page, made from the JSON alone."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulation.belief_predict import FIGURES
from benchmarks.simulation.belief_work import FIT, SCORE

PAGE, JSON = "belief.md", "belief.json"
BEGIN, END = "<!-- belief -->", "<!-- end of belief -->"
NOT_YET = "Not measured yet."
AIM = 0.09
_HEADINGS = (
    "workload", "half", "requests", "TTFT p50 ms", "TTFT p99 ms", "gap p50 ms", "gap p99 ms",
    "mean error", "step time", "told its steps",
)  # fmt: skip


def errors(rows: Sequence[Mapping[str, Any]], by: str = "predicted") -> list[float]:
    """Relative errors of all figures of these halves; `told` by what is told the halves' steps."""
    return [
        row[by][figure] / row["measured"][figure] - 1.0
        for row in rows
        for figure in FIGURES
        if row["measured"][figure] > 0.0
    ]


def mean_error(rows: Sequence[Mapping[str, Any]], by: str = "predicted") -> float:
    """Mean absolute relative error; 0 without figures."""
    found = errors(rows, by)
    return sum(map(abs, found)) / max(1, len(found))


def of_role(rows: Sequence[Mapping[str, Any]], role: str) -> list[Mapping[str, Any]]:
    """The halves that were fitted, or scored."""
    return [row for row in rows if row["half"] == role]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Predicted / measured and the relative error; the halves that are scored first."""
    ordered = of_role(rows, SCORE) + of_role(rows, FIT)
    cells = [_HEADINGS, *(tuple(_cells(row)) for row in ordered)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEADINGS))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join((lines[0], rule, *lines[1:]))


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield row["workload"]
    yield "scored" if row["half"] == SCORE else "fitted"
    yield str(row["requests"])
    for figure in FIGURES:
        predicted, measured = row["predicted"][figure], row["measured"][figure]
        error = f" ({predicted / measured - 1.0:+.0%})" if measured > 0.0 else ""
        yield f"{predicted:,.0f} / {measured:,.0f}{error}"
    yield f"{mean_error([row]):.0%}"
    yield f"{row['step_time']:.2f}"
    yield f"{mean_error([row], 'told'):.0%}"


def section(document: Mapping[str, Any]) -> str:
    """All that the page says of a run."""
    rows, machine, fit = document["rows"], document["machine"], document["fit"]
    scored, fitted = of_role(rows, SCORE), of_role(rows, FIT)
    found = errors(scored)
    kind = "A quick run, shorter than described and rough: " if document["quick"] else ""
    verdict = "within" if mean_error(scored) <= AIM else "beyond"
    return "\n\n".join(
        (
            f"**Mean absolute relative error of the {len(found)} scored figures: "
            f"{mean_error(scored):.1%}**, {verdict} the {AIM:.0%} aimed at; the median is "
            f"{statistics.median(map(abs, found)):.1%}, the largest {max(found, key=abs):+.0%}. "
            f"Of the fitted halves: {mean_error(fitted):.1%}. Told how the scored halves' own "
            f"steps scatter: {mean_error(scored, 'told'):.1%}.",
            f"Predicted / measured (error):\n\n{table(rows)}",
            f"Fitted: {fit['cost']}; {fit['between_ms']:.2f} ms between two steps. Medians of the "
            f"ways: {fit['request_ms']:.1f} ms from client to core, {fit['token_ms']:.1f} ms from "
            f"the core's result to the client, {fit['round_trip_ms']:.1f} ms from plan to result "
            f"beside the step. {document['replayed_rounds']:,} rounds of the trace were the same "
            "when replayed.",
            f"{kind}`{document['command']}`, {document['date']}, {document['took_s']:.0f} s, "
            f"commit {machine['commit'] or 'unknown'}, {machine['cores']} cores "
            f"{machine['cpu']}, load average {document['load_before']} before and "
            f"{document['load_after']} after it.",
        )
    )


def find_section(page: str) -> str | None:
    """What stands between the marks; None if the page lacks them."""
    if BEGIN not in page or END not in page:
        return None
    return page.split(BEGIN, 1)[1].split(END, 1)[0].strip("\n")


def with_section(page: str, text: str) -> str:
    """The page with another text between the marks. Raises ValueError if it lacks them."""
    if find_section(page) is None:
        raise ValueError("the page has no marks")
    head, rest = page.split(BEGIN, 1)
    return f"{head}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}"


def write(folder: Path, document: Mapping[str, Any], text: str) -> list[Path]:
    """The JSON, and the page where the folder has it; what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    path, page_path = folder / JSON, folder / PAGE
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if not page_path.is_file():
        return [path]
    page_path.write_text(with_section(page_path.read_text(), text), encoding="utf-8")
    return [path, page_path]
