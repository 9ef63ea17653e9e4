"""What a study leaves: JSON with everything, a table, and its part of the page.

The page's text about a study is made from the JSON alone, between two marks, so that no number in
it can be of another run.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.study import Column, Row, Study

NAME = "scheduling.md"
NOT_YET = "Not measured yet."


def table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """As Markdown, aligned."""
    cells = [[column.heading for column in columns]]
    cells += [[column.cell(row) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def paths(folder: Path, study: Study) -> tuple[Path, Path]:
    """Of the JSON and of the picture."""
    return folder / f"study-{study.letter}.json", folder / f"study-{study.letter}.png"


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Rows and what they depend on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def source(document: Mapping[str, Any]) -> str:
    """Where the rows come from, in a line."""
    machine = document["machine"]
    kind = "A quick run, smaller than described and rough: `" if document["quick"] else "`"
    return (
        f"{kind}{document['command']}`, {document['took_s']:.0f} s, commit "
        f"{machine['commit'] or 'unknown'}, {machine['cores']} cores {machine['cpu']}, "
        f"{machine['memory_gib']:.0f} GiB, torch {machine['torch']}, load average "
        f"{machine['load_before']} before it."
    )


def section(study: Study, document: Mapping[str, Any]) -> str:
    """The study's part of the page."""
    rows = document["rows"]
    picture = f"![{study.title}](study-{study.letter}.png)"
    parts = (
        study.question,
        table(study.columns, rows),
        study.sentences(rows),
        picture,
        source(document),
    )
    return "\n\n".join(parts)


def _marks(study: Study) -> tuple[str, str]:
    return f"<!-- study {study.letter} -->", f"<!-- end of study {study.letter} -->"


def find_section(page: str, study: Study) -> str | None:
    """What stands between the study's marks; None if the page lacks them."""
    begin, end = _marks(study)
    if begin not in page or end not in page:
        return None
    return page.split(begin, 1)[1].split(end, 1)[0].strip("\n")


def with_section(page: str, study: Study, text: str) -> str:
    """The page with another text between the marks. Raises ValueError if it lacks them."""
    if find_section(page, study) is None:
        raise ValueError(f"the page has no marks of study {study.letter}")
    begin, end = _marks(study)
    head, rest = page.split(begin, 1)
    return f"{head}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}"
