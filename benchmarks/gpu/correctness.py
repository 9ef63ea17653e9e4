"""Every operator against float64 on the device, as many cases as the time allows.

Most of the time goes into compiling, so several processes share the list. Each writes a case's line
as soon as it is done, with the name of its next one: of a kernel that hangs, the last line of its
process tells the name, and nothing that was done is lost.
"""

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from benchmarks.gpu.common import Place, emit, place
from tests.kernels.on_device import Check, checks

VOCABULARIES, DRY_VOCABULARIES = (1000, 32_000, 128_256), (300,)
DRY_EVERY = 23  # cases of which a dry run does one
MAX_PROBLEM = 500  # characters of a line's problem: a short line is written in one piece
MAX_PROCESSES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Of one process's share of the cases."""

    done: int
    of: int
    failed: int
    worst_passing: float


def shard(number: int, count: int, where: Place) -> Tally:
    """Every count-th case from `number` on, until the time is over."""
    deadline = time.monotonic() + where.seconds
    torch.set_num_threads(1)
    every = checks(where.device, DRY_VOCABULARIES if where.dry else VOCABULARIES)
    mine = every[:: DRY_EVERY if where.dry else 1][number::count]
    names = [name[:MAX_PROBLEM] for name, _ in mine]
    emit(shard=number, of=len(mine), next=names[0] if names else None)
    done, failed, worst = 0, 0, 0.0
    for name, following, (_, check) in zip(names, [*names[1:], None], mine, strict=False):
        if time.monotonic() > deadline:
            break
        error, problem = _outcome(check)
        passed = error is not None and error <= 1
        done += 1
        failed += not passed
        if passed and error is not None:
            worst = max(worst, error)
        more = {} if problem is None else {"problem": problem}
        emit(shard=number, case=name, error=error, passed=passed, **more, next=following)
    return Tally(done=done, of=len(mine), failed=failed, worst_passing=worst)


def _outcome(check: Check) -> tuple[float | None, str | None]:
    """The error in tolerances, or what went wrong: one case must not hide the others."""
    try:
        error = check()
    except Exception as problem:
        return None, f"{type(problem).__name__}: {problem}"[:MAX_PROBLEM]
    # JSON has no infinity.
    return (error, None) if error < float("inf") else (None, f"error {error}")


def conclude(tallies: list[Tally]) -> None:
    """One line of all processes; exits when a case failed, or none was done."""
    done, failed = sum(tally.done for tally in tallies), sum(tally.failed for tally in tallies)
    emit(
        cases=done,
        of=sum(tally.of for tally in tallies),
        failed=failed,
        worst_passing=round(max((tally.worst_passing for tally in tallies), default=0.0), 3),
    )
    if failed:
        raise SystemExit(f"{failed} cases are over their tolerance")
    if not done:
        raise SystemExit("no case was done")


def main(argv: list[str]) -> None:
    """A line for each case, and one of all."""
    where = place(argv, __doc__ or "")
    processors = len(os.sched_getaffinity(0))
    count = 1 if where.dry else max(1, min(MAX_PROCESSES, processors // 2))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        futures = [pool.submit(shard, number, count, where) for number in range(count)]
        conclude([future.result() for future in futures])


if __name__ == "__main__":
    main(sys.argv[1:])
