"""What is wrong with a simulated Redis, each trouble for itself: one that ends leaves the others.

    outage        commands fail at once, for all processes or for one
    hang          commands wait; a client gives up after HANG_S. When the server wakes it does what
                  it holds, some of it although its client has given up (the rest never came)
    lost answers  commands are done, their answers get lost
    crash         an outage after which the server knows what its file held (RedisServer.forget)

Each counts the commands that it hit.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

HANG_S = 2.0


@dataclass(slots=True, eq=False)
class Held:
    """A command that waits for the server to wake. `stays` if its client can't take it back."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    answer: "asyncio.Future[Any]"
    stays: bool
    given_up: bool = False

    def do(self) -> None:
        """The server does it, and answers if anybody waits."""
        if self.given_up and not self.stays:
            return
        try:
            answer = self.function(*self.args)
        except RedisError as error:
            self.fail(error)
            return
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: RedisError) -> None:
        """It won't be done."""
        if not self.given_up and not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True, eq=False)
class Outage:
    """Of all processes or of one. One of a server that starts anew takes the time that it takes."""

    hangs: bool = False
    restarts: bool = False
    process: str | None = None
    num_hit: int = 0
    held: list[Held] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class LostAnswers:
    """So many of them."""

    num_left: int
    num_hit: int = 0


class Trouble:
    """All that is wrong now."""

    def __init__(self) -> None:
        self._outages: list[Outage] = []
        self._lost: list[LostAnswers] = []

    def outage_of(self, process: str) -> Outage | None:
        """What keeps a process's commands from being done: the latest."""
        for outage in reversed(self._outages):
            if outage.process in (None, process):
                return outage
        return None

    def begin(self, outage: Outage) -> None:
        """From now on."""
        self._outages.append(outage)

    def end(self, outage: Outage) -> None:
        """What it holds is done now, unless another outage goes on."""
        if outage not in self._outages:
            return
        self._outages.remove(outage)
        held, outage.held = outage.held, []
        left = next((o for o in reversed(self._outages) if o.process is None), None)
        for command in held:
            if left is None:
                command.do()
            elif left.hangs:
                left.held.append(command)
            else:
                command.fail(RedisConnectionError("Connection reset by peer"))

    def reset(self) -> None:
        """All connections are gone: what hangs is not done any more."""
        for outage in self._outages:
            held, outage.held = outage.held, []
            for command in held:
                command.fail(RedisConnectionError("Connection reset by peer"))

    def lose(self, count: int) -> LostAnswers:
        """So many answers."""
        lost = LostAnswers(count)
        self._lost.append(lost)
        return lost

    def lose_no_more(self, lost: LostAnswers) -> None:
        """The rest arrives."""
        if lost in self._lost:
            self._lost.remove(lost)

    def takes_answer(self) -> bool:
        """Whether this answer is lost."""
        for lost in self._lost:
            if lost.num_left:
                lost.num_left -= 1
                lost.num_hit += 1
                return True
        return False

    def heal(self) -> None:
        """All of it."""
        self._lost.clear()
        for outage in reversed(self._outages[:]):
            if not outage.restarts:
                self.end(outage)
