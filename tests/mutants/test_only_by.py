"""Which mutants count as found by histories alone."""

from typing import Any, cast

import pytest

from tests.mutants import only_by, run
from tests.mutants.only_by import Looked, look


class FakeCopy:
    """Where a history and the unit tests say what they are told to."""

    def __init__(self, by: str, status: int) -> None:
        self._by, self._status = by, status
        self.planted: list[bool] = []
        self.asked: list[str] = []

    def plant(self, _: run.Mutant, *, reverse: bool = False) -> None:
        """Notes it."""
        self.planted.append(not reverse)

    def find(self, _: str) -> tuple[str, float]:
        """As told."""
        return self._by, 1.0

    def run(self, command: list[str], _: float) -> tuple[int, str, float]:
        """As told."""
        self.asked += command
        return self._status, "FAILED tests/unit/x.py::y\n" if self._status else "", 1.0


@pytest.mark.parametrize(
    ("by", "status", "counts"),
    [("simulator, seed 1", 0, True), ("simulator, seed 1", 1, False), ("", 0, False)],
)
def test_what_counts(by: str, status: int, counts: bool) -> None:
    """Found by a history, by no unit test; and taken away again."""
    copy = FakeCopy(by, status)
    [mutant] = run.mutants(["stall-for-ever"])
    looked = look(cast("Any", copy), mutant)
    assert looked.counts is counts
    assert copy.planted == [True, False]
    assert ("tests/unit/gateway" in copy.asked) is bool(by)
    assert ("tests/integration/gateway" in copy.asked) is bool(by)


def test_what_is_wrong_does_not_count() -> None:
    """Nor what nothing has found."""
    assert not Looked(name="m").counts
    assert not Looked(name="m", by="machine, depth 0, seed 1", problem="does not apply").counts


def test_each_candidate_has_tests_that_see_it() -> None:
    """And as many as are wanted say that only histories find them."""
    marked, whole = only_by.candidates(), only_by.candidates(whole=True)
    assert len(marked) >= run.MIN_ONLY
    assert [mutant for mutant in whole if mutant.only] == marked
    for mutant in whole:
        paths = only_by.tests_of(mutant)
        assert paths
        assert all((run.ROOT / path).exists() for path in paths)
