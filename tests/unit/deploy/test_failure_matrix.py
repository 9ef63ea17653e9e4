"""docs/operations/failures.md: every cell says something, and every test that it names exists."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MATRIX = ROOT / "docs" / "operations" / "failures.md"
TEST_ID = re.compile(r"`([a-z0-9_/]+\.py)::(\w+)`")
MOMENTS = 6
LATER = "Later"
LIMIT_S = 240.0


def rows(text: str) -> list[list[str]]:
    """Cells of the tables' rows, without heads and rules."""
    found = []
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| what "):
            found.append([cell.strip() for cell in line.strip().strip("|").split(" | ")])
    return found


@cache
def defined_in(name: str) -> frozenset[str]:
    """Test functions of a file below tests/, by its source: quick, and blind to what a mark, an
    import or a later definition does to them."""
    path = ROOT / "tests" / name
    if not path.is_file():
        return frozenset()
    return frozenset(
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    )


def collected(names: set[str]) -> set[tuple[str, str]]:
    """Files with the tests that pytest itself collects from them, whatever their marks."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider",
         *(str(ROOT / "tests" / name) for name in sorted(names))],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return set(re.findall(r"^tests/(\S+\.py)::(\w+)", done.stdout, re.MULTILINE))


def problems(text: str, tests_of: Callable[[str], frozenset[str]] = defined_in) -> list[str]:
    """What is wrong with a matrix."""
    found = []
    for what, *cells in rows(text):
        if len(cells) != MOMENTS:
            found.append(f"{what}: {len(cells)} moments")
        for cell in cells:
            named = TEST_ID.findall(cell)
            if not named and LATER not in cell:
                found.append(f"{what}: {cell!r} names no test and is not marked {LATER}")
            found += [f"{what}: no test {f}::{t}" for f, t in named if t not in tests_of(f)]
    return found


def test_the_matrix_names_tests_that_exist() -> None:
    """In every cell that is not for later."""
    assert problems(MATRIX.read_text()) == []
    assert len(rows(MATRIX.read_text())) >= 15


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_pytest_collects_every_test_that_the_matrix_names() -> None:
    """A function that is defined twice, or whose module does not import, is no test."""
    text = MATRIX.read_text()
    found = collected({name for name, _ in TEST_ID.findall(text)})
    assert problems(text, lambda name: frozenset(t for f, t in found if f == name)) == []


@pytest.mark.slow
def test_a_function_that_pytest_passes_over_is_told(tmp_path: Path) -> None:
    """By its source it is a test; pytest says that it is none."""
    source = tmp_path / "test_none.py"
    source.write_text("def test_a() -> None: ...\n\n\ntest_a.__test__ = False\n")
    assert defined_in(str(source)) == {"test_a"}
    with pytest.raises(AssertionError, match="no tests"):
        collected({str(source)})


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
