"""Planted bugs that only histories find: `python -m tests.mutants.only_by [NAME...] [--all]`.

Of each mutant whose header says `Only: histories` - with --all of each that the machine or the
simulator is to find: found by it, and by none of the tests that can see the package which it
changes, slow ones included. The services import nothing of each other, so a bug in one can't fail
the tests of another. Left out is what no test can tell from a right answer: whole processes (e2e)
and kernels, where a wrong plan shows as little as in what is looked at here; and the histories.
Exit status 1: there are fewer than wanted (run.MIN_ONLY, or all of those named).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tests.mutants.run import (
    MIN_ONLY,
    UNIT_LIMIT_S,
    Copy,
    Mutant,
    MutantError,
    _pytest,
    history,
    in_copies,
    mutants,
)

# By the clock, for one test: a slow one on a busy machine must not pass for one that fails.
TEST_LIMIT_S = 600
SLOW_TOO = "not gpu and not soak and not e2e"
# By the first folder of a changed file, the tests that import it.
SEEN_BY = {
    "gateway": ("tests/unit/gateway", "tests/contract", "tests/integration/gateway"),
    "gpu_worker": ("tests/unit/gpu_worker", "tests/contract", "tests/integration/worker"),
    "scheduler_svc": (
        "tests/traces",
        "tests/unit/scheduler_core",
        "tests/unit/scheduler_svc",
        "tests/contract",
        "tests/integration/scheduler",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What became of a mutant. `test` is another test that finds it, "" if none does."""

    name: str
    by: str = ""
    test: str = ""
    problem: str = ""

    @property
    def counts(self) -> bool:
        """A history finds it and no other test."""
        return bool(self.by) and not self.test and not self.problem


def candidates(names: Sequence[str] = (), *, whole: bool = False) -> list[Mutant]:
    """Those named; else those whose header says it, or the `whole` of what a history is to find."""
    found = [mutant for mutant in mutants(names) if any(map(history, mutant.finders))]
    return [mutant for mutant in found if names or whole or mutant.only]


def tests_of(mutant: Mutant) -> list[str]:
    """That can see what it changes."""
    packages = dict.fromkeys(name.partition("/")[0] for name in mutant.files)
    return [path for package in packages for path in SEEN_BY[package]]


def look(copy: Copy, mutant: Mutant) -> Looked:
    """Plants it, has it found, asks the unit tests, takes it away."""
    try:
        copy.plant(mutant)
    except MutantError as error:
        return Looked(name=mutant.name, problem=str(error))
    try:
        by = ""
        for finder in mutant.finders:
            if history(finder) and not by:
                by, _ = copy.find(finder)
        if not by:
            return Looked(name=mutant.name, problem="no history finds it")
        command = [*_pytest(*tests_of(mutant)), "-m", SLOW_TOO, f"--timeout={TEST_LIMIT_S}"]
        status, output, _ = copy.run(command, UNIT_LIMIT_S)
        if status == 0:
            return Looked(name=mutant.name, by=by)
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return Looked(name=mutant.name, by=by, test=failed[0] if failed else "one that hangs")
    except MutantError as error:
        return Looked(name=mutant.name, problem=str(error))
    finally:
        copy.plant(mutant, reverse=True)


def main(argv: Sequence[str]) -> int:
    """Prints each as it is known, and the sum."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.only_by", description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants; left out, those whose header says so")
    parser.add_argument("--all", action="store_true", help="all that a history is to find")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(argv)
    try:
        left = candidates(options.names, whole=options.all)
    except MutantError as error:
        parser.error(str(error))
    num_looked = num_found = 0
    for looked in in_copies(left, options.jobs, look):
        num_looked += 1
        num_found += looked.counts
        what = looked.problem or (f"also by {looked.test}" if looked.test else "by no other test")
        sys.stdout.write(f"{looked.name}: {looked.by or '-'}; {what}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{num_found} of {num_looked} are found by histories alone\n")
    return 0 if num_found >= (len(left) if options.names else MIN_ONLY) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
