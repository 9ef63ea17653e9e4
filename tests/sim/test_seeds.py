"""Seeds of the standard fault mix: no promise is broken, and each kind of fault took effect."""

from collections.abc import Iterator

import pytest

from scheduler_svc.sim import __main__ as runs
from scheduler_svc.sim.__main__ import judge, missing, problem, report, run_seeds
from scheduler_svc.sim.world import Options, Outcome


def broken(outcomes: list[Outcome]) -> str:
    """How to play the seeds again that broke a promise, "" for none."""
    options = Options()
    found = [report(o, what) for o in outcomes if (what := problem(o, options)) is not None]
    return "\n".join(found)


def made_up(count: int, *bad: int) -> Iterator[Outcome]:
    """Outcomes without a world, of which these seeds broke a promise."""
    for seed in range(count):
        rule = "nothing is lost" if seed in bad else ""
        yield Outcome(seed=seed, rule=rule, detail="a token is lost" if rule else "")


def test_a_run_tells_how_far_it_is_in_so_many_lines_at_most() -> None:
    for count in (1_000, 30_000):
        told: list[str] = []
        said: list[str] = []
        assert judge(made_up(count, 7), count, Options(only=""), said.append, told.append) == 1
        assert len(told) == min(count // runs.TELL_EVERY, runs.LINES)
        assert told[0].startswith(f"{max(runs.TELL_EVERY, count // runs.LINES)} of {count} seeds")
        assert "1 bad" in told[0]
        assert [text for text in said if "seed 7: a token is lost" in text]
        assert said[-1] == f"1 of {count} seeds broke a promise\n"


def test_a_run_ends_when_so_many_have_broken_a_promise() -> None:
    """However many are left: they would say the same again, at some cost."""
    outcomes, said = made_up(1_000_000, *range(100, 900)), list[str]()
    assert judge(outcomes, 1_000_000, Options(only=""), said.append, said.append) == 1
    assert next(outcomes).seed == 100 + runs.MAX_BAD
    assert said[-2] == f"{runs.MAX_BAD} of {100 + runs.MAX_BAD} seeds broke a promise\n"
    assert said[-1] == f"it ended there: {1_000_000 - 100 - runs.MAX_BAD} seeds are left\n"


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
