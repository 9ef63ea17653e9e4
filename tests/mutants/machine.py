"""The stateful machine in short rounds of all depths, so that a bug is found within seconds.

The rules, and what is checked, are those of tests/stateful/test_core_machine.py; there each depth
runs its examples to the end before the next one begins. The first failure is named by depth and
seed, with which it comes again. Exit status: 1 for a failure, 0 for none.

    python -m tests.mutants.machine [--rounds N] [--seed S]
"""

import argparse
import sys
import traceback
from collections.abc import Sequence

from hypothesis import seed as with_seed
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.stateful.test_core_machine import SETTINGS, machine

# The quickest to find something first.
DEPTHS = (2, 0, 8, 1, 4)
EXAMPLES, STEPS, ROUNDS = 6, 50, 3


def failure(depth: int, seed: int) -> str | None:
    """Plays a round of histories; the last line of what went wrong, None if nothing did."""
    short = settings(SETTINGS, max_examples=EXAMPLES, stateful_step_count=STEPS, database=None)
    try:
        run_state_machine_as_test(with_seed(seed)(machine(depth)), settings=short)
    except Exception as error:
        return traceback.format_exception_only(error)[0].strip().splitlines()[0]
    return None


def main(argv: Sequence[str]) -> int:
    """Round after round, each with another seed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.machine", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    options = parser.parse_args(argv)
    for seed in range(options.seed, options.seed + options.rounds):
        for depth in DEPTHS:
            if (what := failure(depth, seed)) is not None:
                sys.stdout.write(f"machine, depth {depth}, seed {seed}: {what}\n")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
