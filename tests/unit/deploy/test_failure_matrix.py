"""docs/operations/failures.md: every cell says something, and every test that it names exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MATRIX = ROOT / "docs" / "operations" / "failures.md"
TEST_ID = re.compile(r"`([a-z0-9_/]+\.py)::(\w+)`")
MOMENTS = 6
LATER = "Later"


def rows(text: str) -> list[list[str]]:
    """Cells of the tables' rows, without heads and rules."""
    found = []
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| what "):
            found.append([cell.strip() for cell in line.strip().strip("|").split(" | ")])
    return found


@cache
def collected_from(name: str) -> frozenset[str]:
    """Test functions that pytest would collect from a file below tests/."""
    path = ROOT / "tests" / name
    if not path.is_file():
        return frozenset()
    return frozenset(
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    )


def problems(text: str) -> list[str]:
    """What is wrong with a matrix."""
    found = []
    for what, *cells in rows(text):
        if len(cells) != MOMENTS:
            found.append(f"{what}: {len(cells)} moments")
        for cell in cells:
            named = TEST_ID.findall(cell)
            if not named and LATER not in cell:
                found.append(f"{what}: {cell!r} names no test and is not marked {LATER}")
            found += [f"{what}: no test {f}::{t}" for f, t in named if t not in collected_from(f)]
    return found


def test_the_matrix_names_tests_that_exist() -> None:
    """In every cell that is not for later."""
    assert problems(MATRIX.read_text()) == []
    assert len(rows(MATRIX.read_text())) >= 15


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("a pause", "names no test"),
        ("a pause: `unit/deploy/test_failure_matrix.py::test_nobody`", "no test"),
        ("a pause: `unit/deploy/nowhere.py::test_a`", "no test"),
        ("", "names no test"),
    ],
)
def test_what_is_missing_is_told(cell: str, problem: str) -> None:
    """An empty cell is a hole in what is promised."""
    good = "nothing: `unit/deploy/test_failure_matrix.py::test_what_is_missing_is_told`"
    told = problems("| row | " + " | ".join([cell, *[good] * 5]) + " |")
    assert len(told) == 1
    assert problem in told[0]
    assert problems(f"| row | {good} |") == ["row: 1 moments"]
