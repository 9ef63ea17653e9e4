"""200 seeds of the standard fault mix: no promise is broken, and each kind of fault took effect."""

import pytest

from scheduler_svc.sim.__main__ import missing, problem, report, run_seeds
from scheduler_svc.sim.world import Options, Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_SEEDS, PART = 200, 50
_outcomes: dict[int, list[Outcome]] = {}


def part(first: int) -> list[Outcome]:
    """The outcomes of some seeds, run once."""
    if first not in _outcomes:
        _outcomes[first] = run_seeds(range(first, first + PART), Options())
    return _outcomes[first]


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, PART))
def test_no_promise_is_broken(first: int) -> None:
    """In any of these seeds; the report says how to play it again."""
    options = Options()
    found = [report(o, what) for o in part(first) if (what := problem(o, options)) is not None]
    assert not found, "\n".join(found)


def test_each_kind_of_fault_took_effect() -> None:
    """A run in which one did not would have tested less than it says."""
    outcomes = [outcome for first in range(0, NUM_SEEDS, PART) for outcome in part(first)]
    assert missing(outcomes) == []
