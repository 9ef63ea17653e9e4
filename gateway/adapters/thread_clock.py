"""How much of its time a thread has wanted a core, whether it had one or waited for one."""

import os
import time
from collections.abc import Callable

# Nanoseconds on a core, nanoseconds ready without one, number of stretches.
SCHEDSTAT = "/proc/thread-self/schedstat"


def wanted_s(path: str = SCHEDSTAT) -> Callable[[], float]:
    """A clock of the thread that calls this, in seconds; where the kernel does not tell of waiting,
    of its time on a core."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return time.thread_time

    def read() -> float:
        ran_ns, waited_ns, _ = os.pread(file, 100, 0).split()
        return (int(ran_ns) + int(waited_ns)) / 1e9

    return read
