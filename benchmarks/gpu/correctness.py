"""Every operator against float64 on the device, as many cases as the time allows.

Most of the time goes into compiling, so several processes share the list.
"""

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks.gpu.common import emit, place
from tests.kernels.on_device import checks

VOCABULARIES, DRY_VOCABULARIES = (1000, 32_000, 128_256), (300,)
DRY_EVERY = 23  # cases of which a dry run does one


def shard(number: int, count: int, device: str, seconds: float, dry: bool) -> dict[str, Any]:
    """Every count-th case from `number` on, until the time is over."""
    deadline = time.monotonic() + seconds
    torch.set_num_threads(1)
    every = checks(torch.device(device), DRY_VOCABULARIES if dry else VOCABULARIES)
    mine = every[:: DRY_EVERY if dry else 1][number::count]
    done, worst, failures = 0, 0.0, {}
    for case, check in mine:
        if time.monotonic() > deadline:
            break
        name = case
        try:
            error = check()
        except Exception as problem:  # one case must not hide the others
            error, name = float("inf"), f"{case}: {type(problem).__name__}: {problem}"[:500]
        done += 1
        if error <= 1:
            worst = max(worst, error)
        else:
            failures[name] = str(error)
    return {"cases": done, "of": len(mine), "worst_passing": round(worst, 3), "failures": failures}


def main(argv: list[str]) -> None:
    """One line for each process; fails when a case does."""
    where = place(argv, __doc__ or "")
    count = 1 if where.dry else max(1, min(8, len(os.sched_getaffinity(0)) // 2))
    context = multiprocessing.get_context("spawn")
    failed = False
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        futures = [
            pool.submit(shard, number, count, str(where.device), where.seconds, where.dry)
            for number in range(count)
        ]
        for future in futures:
            found = future.result()
            failed |= bool(found["failures"])
            emit(**found)
    if failed:
        raise SystemExit("some cases are over their tolerance")


if __name__ == "__main__":
    main(sys.argv[1:])
