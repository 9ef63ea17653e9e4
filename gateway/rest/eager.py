"""An awaitable that is run at once as far as it goes, and by a task from where it has to wait.

Most sends never wait. Begun where their bytes come about they need no task to be woken, which costs
more than they do.
"""

from collections.abc import Awaitable, Generator
from typing import Any


class Rest:
    """What is left of one that waits; await it once, in a task, or close it."""

    def __init__(self, steps: Generator[Any, Any, None], waits_for: object) -> None:
        self._steps = steps
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                try:
                    answer = yield waits_for
                except BaseException as error:
                    waits_for = self._steps.throw(error)
                else:
                    waits_for = self._steps.send(answer)
            except StopIteration:
                return

    def close(self) -> None:
        """Gives it up."""
        self._steps.close()


def begin(awaitable: Awaitable[None]) -> Rest | None:
    """Runs it until it has to wait, in the caller's own task or callback; None if it has ended.

    Raises what it raises. It must not ask which task it runs in before it waits.
    """
    steps = awaitable.__await__()
    try:
        return Rest(steps, next(steps))
    except StopIteration:
        return None
