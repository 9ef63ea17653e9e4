"""Tests of what depends on time, in a loop whose time jumps to the next timer."""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from scheduler_svc.sim.loop import VirtualLoop

P = ParamSpec("P")


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Waits cost nothing, and a machine that stands still is not noticed.

    For tests without sockets, threads and async fixtures.
    """

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        loop = VirtualLoop()
        try:
            loop.run(test(*args, **kwargs))
        finally:
            loop.wind_up()

    return run
