"""Legal moves of a request, as one table. docs/state-machine.md is generated from it.

WAITING    holds no slot and no block; may be admitted.
RUNNING    holds a slot and blocks on one worker.
RETURNING  gave its slot up while steps with it are unreturned; may not be admitted before.
FINISHED   has had its one end.
"""

import enum


class RequestState(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    RETURNING = "returning"
    FINISHED = "finished"


class Move(enum.Enum):
    """What can happen to a request."""

    ADMIT = "admit"
    YIELD = "yield slot, nothing in flight"
    YIELD_IN_FLIGHT = "yield slot, steps in flight"
    RETURN = "last step returned"
    FINISH = "finish"


TRANSITIONS: dict[tuple[RequestState, Move], RequestState] = {
    (RequestState.WAITING, Move.ADMIT): RequestState.RUNNING,
    (RequestState.WAITING, Move.FINISH): RequestState.FINISHED,
    (RequestState.RUNNING, Move.YIELD): RequestState.WAITING,
    (RequestState.RUNNING, Move.YIELD_IN_FLIGHT): RequestState.RETURNING,
    (RequestState.RUNNING, Move.FINISH): RequestState.FINISHED,
    (RequestState.RETURNING, Move.RETURN): RequestState.WAITING,
    (RequestState.RETURNING, Move.FINISH): RequestState.FINISHED,
}


def after(state: RequestState, move: Move) -> RequestState:
    """The state after a move. An illegal move is a bug of ours and raises AssertionError."""
    target = TRANSITIONS.get((state, move))
    assert target is not None, f"illegal move: {move.value!r} of a {state.value} request"
    return target
