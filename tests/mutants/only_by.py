"""Planted bugs that only histories find: `python -m tests.mutants.only_by [--wanted N] [--jobs N]`.

Of each mutant that the machine or the simulator is to find, in turn: found by it, and by none of
the unit tests that can see the package which it changes - the services import nothing of each
other, so a bug in one can't fail the tests of another. It ends when as many are shown as are wanted
(run.MIN_ONLY), so it takes minutes where `--only-by` of run.py, which looks at all of them with all
unit tests, takes an hour. Exit status 1: there are fewer.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tests.mutants.run import (
    HISTORIES,
    MIN_ONLY,
    UNIT_LIMIT_S,
    Copy,
    Mutant,
    MutantError,
    _pytest,
    in_copies,
    mutants,
)

# By the clock, for one test: a slow one on a busy machine must not pass for one that fails.
TEST_LIMIT_S = 600
# By the first folder of a changed file, the unit tests that import it.
SEEN_BY = {
    "gateway": ("tests/unit/gateway",),
    "gpu_worker": ("tests/unit/gpu_worker",),
    "scheduler_svc": ("tests/traces", "tests/unit/scheduler_core", "tests/unit/scheduler_svc"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What became of a mutant. `test` is a unit test that finds it, "" if none does."""

    name: str
    by: str = ""
    test: str = ""
    problem: str = ""

    @property
    def counts(self) -> bool:
        """A history finds it and no unit test."""
        return bool(self.by) and not self.test and not self.problem


def candidates(names: Sequence[str] = ()) -> list[Mutant]:
    """Those that a history is to find."""
    return [mutant for mutant in mutants(names) if set(mutant.finders) & HISTORIES.keys()]


def unit_tests(mutant: Mutant) -> list[str]:
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
            if finder in HISTORIES and not by:
                by, _ = copy.find(finder)
        if not by:
            return Looked(name=mutant.name, problem="no history finds it")
        command = [*_pytest(*unit_tests(mutant)), f"--timeout={TEST_LIMIT_S}"]
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
    parser.add_argument("names", nargs="*", help="mutants; all that a history is to find")
    parser.add_argument("--wanted", type=int, default=MIN_ONLY)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(argv)
    try:
        left = candidates(options.names)
    except MutantError as error:
        parser.error(str(error))
    num_looked = num_found = 0
    for looked in in_copies(left, options.jobs, look):
        num_looked += 1
        num_found += looked.counts
        what = looked.problem or (f"also by {looked.test}" if looked.test else "by no unit test")
        sys.stdout.write(f"{looked.name}: {looked.by or '-'}; {what}\n")
        sys.stdout.flush()
        if num_found >= options.wanted:
            break
    sys.stdout.write(f"{num_found} of {num_looked} are found by histories alone\n")
    return 0 if num_found >= options.wanted else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
