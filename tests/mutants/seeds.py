"""The simulator's fault mix, seed after seed in one process, up to the first broken promise.

Exit status: 1 for one, which is named by its seed and comes again with it; 0 for none.

    python -m tests.mutants.seeds [--count N] [--seed S]
"""

import argparse
import sys
import traceback
from collections.abc import Sequence

from scheduler_svc.sim.__main__ import problem, quiet
from scheduler_svc.sim.world import Options, run_seed

COUNT = 20


def failure(seed: int) -> str | None:
    """What went wrong in a seed, None if nothing did."""
    options = Options()
    try:
        return problem(run_seed(seed, options), options)
    except Exception as error:
        return traceback.format_exception_only(error)[0].strip()


def main(argv: Sequence[str]) -> int:
    """Seeds from `seed` on."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.seeds", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    options = parser.parse_args(argv)
    with quiet():
        for seed in range(options.seed, options.seed + options.count):
            if (what := failure(seed)) is not None:
                sys.stdout.write(f"simulator, seed {seed}: {what.splitlines()[0]}\n")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
