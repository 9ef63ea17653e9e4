"""docs/security.md says for each known fault which test holds its guard: those tests are there."""

import ast
import re
from functools import cache

from benchmarks.stack import ROOT

PAGE = ROOT / "docs" / "security.md"
NUM_ROWS = 35
# Parts of the plan that still bring a guard, or the rest of one.
COMING = ("Kernels", "Scheduler", "Deploy", "Simulator", "Speed")
_TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def rows() -> list[list[str]]:
    """Cells of the table's lines."""
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@cache
def names_in(file: str) -> frozenset[str]:
    """Names of a file's test functions; empty if there is no such file."""
    path = ROOT / "tests" / file
    if not path.is_file():
        return frozenset()
    return frozenset(
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_every_fault_has_its_row() -> None:
    """One line each, in order, with nothing left empty."""
    assert [row[0] for row in rows()] == [str(number) for number in range(1, NUM_ROWS + 1)]
    assert [row for row in rows() if len(row) != 4 or not all(row)] == []


def test_every_row_names_a_test_or_what_will_bring_it() -> None:
    """By file and name, or by a part of the plan."""
    for row in rows():
        held = row[3]
        left = [part.strip() for part in re.split("[,;]", _TEST.sub("", held))]
        assert all(part in ("", *COMING) for part in left), row
        assert _TEST.search(held) or any(left), row


def test_every_test_that_is_named_exists() -> None:
    """A test that was renamed is renamed here."""
    named = [pair for row in rows() for pair in _TEST.findall(row[3])]
    assert [f"{file}::{name}" for file, name in named if name not in names_in(file)] == []
