"""The table of legal moves, and the page that is generated from it."""

import itertools
from pathlib import Path

import pytest

from scheduler_svc.core import lifecycle
from scheduler_svc.core.lifecycle import TRANSITIONS, Move, RequestState, after

PAGE = Path(__file__).parents[3] / "docs" / "state-machine.md"
PAIRS = list(itertools.product(RequestState, Move))


@pytest.mark.parametrize(("state", "move"), TRANSITIONS, ids=str)
def test_legal_moves_lead_where_the_table_says(state: RequestState, move: Move) -> None:
    assert after(state, move) is TRANSITIONS[state, move]


@pytest.mark.parametrize(
    ("state", "move"), [pair for pair in PAIRS if pair not in TRANSITIONS], ids=str
)
def test_illegal_moves_are_bugs_named_with_state_and_move(state: RequestState, move: Move) -> None:
    with pytest.raises(AssertionError, match=f"{move.value}.*{state.value}"):
        after(state, move)


def test_nothing_leaves_finished_and_everything_can_finish() -> None:
    assert all(state is not RequestState.FINISHED for state, _ in TRANSITIONS)
    for state in RequestState:
        if state is not RequestState.FINISHED:
            assert after(state, Move.FINISH) is RequestState.FINISHED


def test_every_state_and_move_is_used() -> None:
    assert {move for _, move in TRANSITIONS} == set(Move)
    assert {*TRANSITIONS.values(), RequestState.WAITING} == set(RequestState)


def test_the_page_is_fresh(rewrite: bool) -> None:
    if rewrite:
        PAGE.write_text(lifecycle.page())
    assert PAGE.read_text() == lifecycle.page()
