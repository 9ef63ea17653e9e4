"""When workers that speak of a later term are believed."""

import pytest

from scheduler_svc.adapters.refusals import (
    ENDED_PERIOD_NS,
    MAX_ENDED,
    MAX_EPOCHS_AHEAD,
    MIN_REFUSALS,
    Credit,
    EpochTooLowError,
    Refusals,
    RefusedError,
    check,
)
from scheduler_svc.adapters.worker_life import ProtocolError

EPOCH = 1000


def test_a_claim_counts_once_it_has_been_made_often_enough_in_a_row() -> None:
    refusals = Refusals(EPOCH, 0)
    for _ in range(2):
        for _ in range(MIN_REFUSALS - 1):
            assert isinstance(refusals.refused(EPOCH + 1, 0), RefusedError)
            assert refusals.claimed_epoch == 0
        refusals.accepted()
    for number in range(MIN_REFUSALS):
        refusals.refused(EPOCH + 1 + number, 0)
    assert refusals.claimed_epoch == EPOCH + MIN_REFUSALS


@pytest.mark.parametrize("claim", [0, EPOCH - 1, EPOCH, EPOCH + MAX_EPOCHS_AHEAD + 1, 2**52])
def test_a_term_that_cannot_have_been_is_no_claim(claim: int) -> None:
    """Or one lie would take the counter to its end."""
    refusals = Refusals(EPOCH, 0)
    for _ in range(2 * MIN_REFUSALS):
        assert isinstance(refusals.refused(claim, 0), ProtocolError)
    assert refusals.claimed_epoch == 0


def test_the_longer_a_term_has_lasted_the_later_the_next_may_have_begun() -> None:
    """An epoch is when its term began: a leader of weeks that has missed its end is told so."""
    three_weeks_ms = 21 * 86_400_000
    refusals = Refusals(EPOCH, 5)
    now_ns = 5 + three_weeks_ms * 1_000_000
    for _ in range(MIN_REFUSALS):
        assert isinstance(refusals.refused(EPOCH + three_weeks_ms, now_ns), RefusedError)
    assert refusals.claimed_epoch == EPOCH + three_weeks_ms
    too_late = EPOCH + three_weeks_ms + MAX_EPOCHS_AHEAD + 1
    assert isinstance(refusals.refused(too_late, now_ns), ProtocolError)


def ended(*claimed: int, credit: Credit, now_ns: int = 0) -> int:
    """The epoch that is stepped over, 0 if the term goes on."""
    try:
        check(claimed, credit, now_ns)
    except EpochTooLowError as error:
        return error.highest_epoch
    return 0


def test_without_a_claim_the_term_goes_on() -> None:
    credit = Credit()
    assert [ended(credit=credit), ended(0, 0, credit=credit)] == [0, 0]
    assert credit.take(0)


def test_some_workers_claims_end_so_many_terms_in_a_time() -> None:
    """Whoever makes them: one that lies can go on for ever."""
    credit = Credit()
    for number in range(MAX_ENDED):
        assert ended(0, 7 + number, credit=credit, now_ns=number) == 7 + number
    assert ended(99, 0, credit=credit, now_ns=MAX_ENDED) == 0
    assert ended(99, 0, credit=credit, now_ns=ENDED_PERIOD_NS - 1) == 0
    assert ended(99, 0, credit=credit, now_ns=ENDED_PERIOD_NS) == 99
    assert ended(99, 0, credit=credit, now_ns=ENDED_PERIOD_NS) == 0


def test_all_workers_together_end_any_number() -> None:
    """For the highest epoch; nothing runs that could lose by it."""
    credit = Credit()
    for _ in range(3 * MAX_ENDED):
        assert ended(7, 9, 8, credit=credit) == 9
