"""Legal moves of a request, as one table. docs/state-machine.md is generated from it."""

import enum


class RequestState(enum.Enum):
    """Where a request stands."""

    # Members are single objects; Enum's own hash, of their names, costs a call at each look-up.
    __hash__ = object.__hash__

    WAITING = "waiting"
    RUNNING = "running"
    RETURNING = "returning"
    SWAPPED = "swapped"
    SWAPPING_IN = "swapping_in"
    FINISHED = "finished"


MEANINGS = {
    RequestState.WAITING: "holds no slot and no block; may be admitted",
    RequestState.RUNNING: "holds a slot and blocks on one worker",
    RequestState.RETURNING: "gave its slot up while steps with it are unreturned; "
    "may not be admitted before they return",
    RequestState.SWAPPED: "gave its slot up; what it has computed is in host blocks of its worker, "
    "or on its way there",
    RequestState.SWAPPING_IN: "holds blocks that are filled from host memory, and no slot yet",
    RequestState.FINISHED: "has had its one end",
}


class Move(enum.Enum):
    """What can happen to a request."""

    __hash__ = object.__hash__  # as above

    ADMIT = "admit"
    YIELD = "lose its work, nothing in flight"
    YIELD_IN_FLIGHT = "lose its work, steps in flight"
    RETURN = "last step returned"
    SWAP_OUT = "swap out"
    SWAP_IN = "swap in"
    FINISH = "finish"


TRANSITIONS: dict[tuple[RequestState, Move], RequestState] = {
    (RequestState.WAITING, Move.ADMIT): RequestState.RUNNING,
    (RequestState.WAITING, Move.FINISH): RequestState.FINISHED,
    (RequestState.RUNNING, Move.YIELD): RequestState.WAITING,
    (RequestState.RUNNING, Move.YIELD_IN_FLIGHT): RequestState.RETURNING,
    (RequestState.RUNNING, Move.FINISH): RequestState.FINISHED,
    (RequestState.RETURNING, Move.RETURN): RequestState.WAITING,
    (RequestState.RETURNING, Move.FINISH): RequestState.FINISHED,
    (RequestState.RUNNING, Move.SWAP_OUT): RequestState.SWAPPED,
    (RequestState.SWAPPED, Move.SWAP_IN): RequestState.SWAPPING_IN,
    (RequestState.SWAPPED, Move.ADMIT): RequestState.RUNNING,
    (RequestState.SWAPPED, Move.YIELD): RequestState.WAITING,
    (RequestState.SWAPPED, Move.YIELD_IN_FLIGHT): RequestState.RETURNING,
    (RequestState.SWAPPED, Move.FINISH): RequestState.FINISHED,
    (RequestState.SWAPPING_IN, Move.ADMIT): RequestState.RUNNING,
    (RequestState.SWAPPING_IN, Move.YIELD): RequestState.WAITING,
    (RequestState.SWAPPING_IN, Move.FINISH): RequestState.FINISHED,
}


def after(state: RequestState, move: Move) -> RequestState:
    """The state after a move. An illegal move is a bug of ours and raises AssertionError."""
    target = TRANSITIONS.get((state, move))
    assert target is not None, f"illegal move: {move.value!r} of a {state.value} request"
    return target


def page() -> str:
    """docs/state-machine.md."""
    lines = [
        "# States of a request",
        "",
        "Generated from `scheduler_svc/core/lifecycle.py` by",
        "`pytest tests/unit/scheduler_core/test_lifecycle.py --rewrite`.",
        "",
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> waiting: arrival",
    ]
    for (state, move), target in TRANSITIONS.items():
        lines.append(f"    {state.value} --> {target.value}: {move.value}")
    lines += [
        "    finished --> [*]",
        "```",
        "",
        "| state | meaning |",
        "|---|---|",
    ]
    lines += [f"| {state.value} | {MEANINGS[state]} |" for state in RequestState]
    lines += ["", "| " + " | ".join(["move", *(s.value for s in RequestState)]) + " |"]
    lines += ["|" + "---|" * (1 + len(RequestState))]
    for move in Move:
        targets = (TRANSITIONS.get((state, move)) for state in RequestState)
        cells = ["illegal" if target is None else target.value for target in targets]
        lines.append("| " + " | ".join([move.value, *cells]) + " |")
    return "\n".join(lines) + "\n"
