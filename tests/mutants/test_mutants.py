"""The planted bugs themselves: each can be planted in the code as it is, and says what it breaks.

Whether they are found is for `make mutants`.
"""

import subprocess
from pathlib import Path

import pytest

from tests.mutants import run
from tests.mutants.run import Found, Mutant, MutantError

SHIPPED = ("gateway/", "gpu_worker/", "scheduler_svc/core/", "scheduler_svc/adapters/",
           "scheduler_svc/driver.py", "scheduler_svc/leadership.py",
           "scheduler_svc/term.py")  # fmt: skip


@pytest.mark.parametrize("mutant", run.mutants(), ids=lambda mutant: mutant.name)
def test_a_mutant_applies_to_shipped_code(mutant: Mutant) -> None:
    """One that does not was overtaken by the code: write it anew with `git diff`."""
    assert mutant.files
    assert all(name.startswith(SHIPPED) for name in mutant.files)
    done = subprocess.run(
        ["git", "apply", "--check", "-"],
        cwd=run.ROOT,
        input=mutant.diff,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mutant", run.mutants(), ids=lambda mutant: mutant.name)
def test_a_mutants_finders_are_there(mutant: Mutant) -> None:
    """Histories by name, tests by path."""
    for finder in mutant.finders:
        assert run.history(finder) or (run.ROOT / finder.partition("::")[0]).exists()


def test_a_history_may_begin_with_another_seed() -> None:
    """Where the first that finds a mutant comes late."""
    assert run.history("sim") == ["-m", "tests.mutants.seeds"]
    assert run.history("machine@7") == ["-m", "tests.mutants.machine", "--seed", "7"]
    assert run.history("tests/unit") == []


def test_no_two_mutants_are_the_same() -> None:
    """Each breaks something else."""
    all_mutants = run.mutants()
    assert len({mutant.diff for mutant in all_mutants}) == len(all_mutants)
    assert len({mutant.what for mutant in all_mutants}) == len(all_mutants)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("What: a\nRule: b\n", "unified diff"),
        ("What: a\n\n--- a/x\n+++ b/x\n", "needs What, Rule"),
        ("What: a\nRule: b\nWhy: c\n\n--- a/x\n+++ b/x\n", "'Why: c' is no line"),
    ],
)
def test_a_patch_without_its_header_is_refused(tmp_path: Path, text: str, why: str) -> None:
    """Nobody would know what it is for."""
    path = tmp_path / "some.patch"
    path.write_text(text)
    with pytest.raises(MutantError, match=why):
        run.parse(path)


def found(by: str = "machine, depth 2, seed 1", seconds: float = 1.0, **more: object) -> Found:
    """What became of a mutant."""
    return Found(name="m", what="w", by=by, seconds=seconds, **more)  # type: ignore[arg-type]


def test_all_must_be_found_and_quickly() -> None:
    """One that was not found spoils it, and so does a slow median."""
    assert run.verdict([found(), found(by="tests/unit/a.py::b")], whole=False)[1]
    assert not run.verdict([found(), found(by="", problem="not found")], whole=False)[1]
    assert not run.verdict([found(), found(seconds=9), found(seconds=9)], whole=False)[1]


def test_a_whole_run_needs_enough_of_them() -> None:
    """And enough that the machine or the simulator finds and no other test."""
    only = [found(by="simulator, seed 3", also_by_unit_tests=False)] * run.MIN_ONLY
    others = [found(by="tests/unit/a.py::b")] * (run.MIN_MUTANTS - run.MIN_ONLY)
    assert run.verdict([*only, *others], whole=True)[1]
    assert not run.verdict([*only, *others[1:]], whole=True)[1]
    # Found by another test as well, or not looked at, is not enough.
    also = found(also_by_unit_tests=True)
    assert not run.verdict([*only[1:], also, *others], whole=True)[1]
    assert not run.verdict([*only[1:], found(), *others], whole=True)[1]
