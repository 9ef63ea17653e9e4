"""Which way a preemption goes, by cost, and who it takes: pure functions."""

import pytest

from scheduler_svc.core import policy
from scheduler_svc.core.policy import PreemptionCost
from scheduler_svc.core.types import CostProfile, PreemptionMode
from tests.builders import make_core, make_request, make_worker

SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE
MEASURED = CostProfile(token_us=100.0, swap_out_gb_per_s=2.0, swap_in_gb_per_s=8.0)


def cost(profile: CostProfile = MEASURED, **overrides: float) -> PreemptionCost:
    """A request of 10 MB and 64 tokens."""
    return policy.preemption_cost(num_bytes=10_000_000, num_uncached=64, cost=profile, **overrides)


def test_a_swap_is_paid_twice_at_the_bandwidth_of_each_way() -> None:
    assert cost() == PreemptionCost(swap_us=5000.0 + 1250.0, recompute_us=6400.0)


def test_overrides_stand_for_what_was_measured() -> None:
    assert cost(swap_gb_per_s=10.0) == PreemptionCost(swap_us=2000.0, recompute_us=6400.0)
    assert cost(token_us=1.0) == PreemptionCost(swap_us=6250.0, recompute_us=64.0)
    unknown = cost(CostProfile(), swap_gb_per_s=1.0, token_us=2.0)
    assert unknown == PreemptionCost(swap_us=20_000.0, recompute_us=128.0)


def test_what_is_not_known_has_no_cost() -> None:
    assert cost(CostProfile()) == PreemptionCost(swap_us=None, recompute_us=None)
    one_way = CostProfile(token_us=1.0, swap_out_gb_per_s=1.0)
    assert cost(one_way) == PreemptionCost(swap_us=None, recompute_us=64.0)
    no_bytes = policy.preemption_cost(num_bytes=0, num_uncached=8, cost=MEASURED)
    assert no_bytes == PreemptionCost(swap_us=None, recompute_us=800.0)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("last", [None, SWAP, RECOMPUTE])
def test_a_mode_that_is_set_does_not_look_at_costs(mode: str, last: PreemptionMode | None) -> None:
    for swap_us in (None, 1.0, 1e9):
        price = PreemptionCost(swap_us=swap_us, recompute_us=5.0)
        assert policy.choose_preemption(mode, price, last=last) is PreemptionMode(mode)


@pytest.mark.parametrize(
    ("swap_us", "recompute_us", "last", "chosen"),
    [
        (99.0, 100.0, None, SWAP),
        (100.0, 99.0, None, RECOMPUTE),
        (100.0, 100.0, None, RECOMPUTE),
        # The other way has to be clearly cheaper.
        (81.0, 100.0, RECOMPUTE, RECOMPUTE),
        (79.0, 100.0, RECOMPUTE, SWAP),
        (100.0, 81.0, SWAP, SWAP),
        (100.0, 79.0, SWAP, RECOMPUTE),
        # Nothing is known of one.
        (None, 100.0, SWAP, RECOMPUTE),
        (100.0, None, SWAP, RECOMPUTE),
    ],
)
def test_auto_takes_the_cheaper_way_and_keeps_to_it(
    swap_us: float | None,
    recompute_us: float | None,
    last: PreemptionMode | None,
    chosen: PreemptionMode,
) -> None:
    price = PreemptionCost(swap_us=swap_us, recompute_us=recompute_us)
    assert policy.choose_preemption("auto", price, last=last) is chosen


def test_who_is_spared_after_some_preemptions() -> None:
    core = make_core()
    core.feed(make_worker())
    for name in "abc":
        core.feed(make_request(name))
    core.take_ready()
    (worker,) = core._workers.values()
    a, b, c = worker.ranked
    assert policy.choose_victim("fcfs", worker.ranked, max_preemptions=2) is c
    c.num_preemptions = 2
    assert policy.choose_victim("fcfs", worker.ranked, max_preemptions=2) is b
    b.num_preemptions = a.num_preemptions = 2
    assert policy.choose_victim("fcfs", worker.ranked, max_preemptions=2) is c, "someone has to go"


def test_what_comes_back_leaves_a_block_to_each_that_runs() -> None:
    assert policy.return_margin(num_running=0, watermark=3) == 0
    assert policy.return_margin(num_running=2, watermark=3) == 3
    assert policy.return_margin(num_running=5, watermark=3) == 5
