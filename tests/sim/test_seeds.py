"""Seeds of the standard fault mix: no promise is broken, and each kind of fault took effect."""

import pytest

from scheduler_svc.sim.__main__ import missing, problem, report, run_seeds
from scheduler_svc.sim.world import Options, Outcome


def broken(outcomes: list[Outcome]) -> str:
    """How to play the seeds again that broke a promise, "" for none."""
    options = Options()
    found = [report(o, what) for o in outcomes if (what := problem(o, options)) is not None]
    return "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_few_seeds_break_no_promise() -> None:
    """As many as a change can wait for."""
    outcomes = run_seeds(range(20), Options())
    assert not broken(outcomes)


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_200_seeds_break_no_promise_and_miss_no_kind_of_fault() -> None:
    """A run in which a kind did not take effect would have tested less than it says."""
    outcomes = run_seeds(range(200), Options())
    assert not broken(outcomes)
    assert missing(outcomes) == []
