"""Histories with too few blocks: nothing is lost, repeated or stuck, whatever ends in between."""

import pytest

from scheduler_svc.core.policy import POLICIES
from tests.swap_histories import MODES, History

DEPTHS = (1, 2, 4, 8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_everything_ends_with_its_own_tokens(mode: str, depth: int) -> None:
    num_swaps = 0
    for seed, policy in enumerate(POLICIES):
        history = History(seed, mode=mode, depth=depth, scheduling_policy=policy)
        history.play()
        num_swaps += history.num_swaps
    assert (num_swaps > 0) == (mode != "recompute")


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_everything_ends_with_its_own_tokens_at_length(mode: str, depth: int) -> None:
    for seed in range(100, 140):
        History(seed, mode=mode, depth=depth).play(200)
