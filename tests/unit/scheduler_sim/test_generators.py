"""Generated traffic: the same by seed, within bounds, and of the kind that its name says."""

import itertools
import os
import statistics
import subprocess
import sys
from typing import Any

import pytest

from scheduler_svc.sim import arrivals
from scheduler_svc.sim.arrivals import GENERATORS, Arrival, ArrivalError, Traffic
from scheduler_svc.sim.arrivals.arrival import problem


def made(kind: str, count: int = 2_000, seed: int = 1, scale: float = 1.0) -> list[Arrival]:
    """That many of a kind, 10 a second."""
    traffic = Traffic(seed=seed, count=count, rate_per_s=10.0, scale=scale)
    return list(arrivals.generate(kind, traffic))


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("scale", [0.02, 1.0, 3.0])
def test_all_arrivals_are_within_the_bounds_of_a_file(kind: str, scale: float) -> None:
    """And come in order of time, as many as were asked for."""
    traffic = Traffic(seed=5, count=500, rate_per_s=10.0, scale=scale)
    source = arrivals.generate(kind, traffic)
    found = list(source)
    assert len(found) == 500
    assert [of for of in found if problem(of, source.prefix_block_tokens)] == []
    assert all(a.at <= b.at for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_seed_is_the_traffic(kind: str) -> None:
    """The same in every pass, another with another seed."""
    source = arrivals.generate(kind, Traffic(seed=1, count=200, rate_per_s=1.0))
    assert list(source) == list(source) == made_at_one(kind, 1)
    assert list(source) != made_at_one(kind, 2)


def made_at_one(kind: str, seed: int) -> list[Arrival]:
    """200 at one a second."""
    return list(arrivals.generate(kind, Traffic(seed=seed, count=200, rate_per_s=1.0)))


@pytest.mark.slow
def test_a_seed_is_the_traffic_in_every_process() -> None:
    """Nothing of it depends on how a process hashes text."""
    code = (
        "from scheduler_svc.sim import arrivals as a;"
        "t = a.Traffic(seed=1, count=50, rate_per_s=1.0);"
        "print([list(a.generate(k, t)) for k in a.GENERATORS])"
    )
    outputs = set()
    for hashes in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1


@pytest.mark.parametrize("kind", ["chat", "long", "variance", "bursts", "agents"])
def test_the_mean_rate_is_kept(kind: str) -> None:
    """Within a fifth over many requests; bursts pay for their silence."""
    found = made(kind, count=20_000)
    assert 8.0 < len(found) / found[-1].at < 12.0


def test_bursts_come_at_many_times_the_mean_rate() -> None:
    """Half of the gaps are about a hundredth of a second; chat's are seven times that."""

    def median_gap(kind: str) -> float:
        return statistics.median(b.at - a.at for a, b in itertools.pairwise(made(kind)))

    assert median_gap("bursts") < median_gap("chat") / 5


def test_long_prompts_are_long_and_chats_are_short() -> None:
    """By a factor of ten and more."""
    long = statistics.mean(of.num_prompt_tokens for of in made("long"))
    assert long > 10 * statistics.mean(of.num_prompt_tokens for of in made("chat"))


def test_outputs_of_high_variance_have_a_tail() -> None:
    """A few requests give a good part of all tokens."""
    outputs = sorted(of.num_output_tokens for of in made("variance"))
    assert outputs[len(outputs) // 2] < 40
    assert sum(outputs[-len(outputs) // 10 :]) > 3 * sum(outputs[: -len(outputs) // 10])


def test_agents_ask_with_all_that_was_said() -> None:
    """A later turn's prompt begins with the earlier one's whole blocks, and is longer."""
    traffic = Traffic(seed=3, count=400, rate_per_s=10.0)
    sessions: dict[int, list[Arrival]] = {}
    for of in arrivals.generate("agents", traffic):
        own = [prefix_id for prefix_id in of.prefix_ids if prefix_id >= 4 * 64]
        if own:
            sessions.setdefault(own[0], []).append(of)
    assert max(len(turns) for turns in sessions.values()) > 4
    for turns in sessions.values():
        for before, after in itertools.pairwise(turns):
            assert after.prefix_ids[: len(before.prefix_ids)] == before.prefix_ids
            said = before.num_prompt_tokens + before.num_output_tokens
            assert after.num_prompt_tokens > said
            assert after.at > before.at


def test_agents_of_an_application_share_its_system_prompt() -> None:
    """Nobody shares anything else."""
    first: dict[int, set[tuple[int, ...]]] = {}
    for of in made("agents"):
        system = tuple(prefix_id for prefix_id in of.prefix_ids if prefix_id < 4 * 64)
        first.setdefault(system[0], set()).add(system)
    assert len(first) == 4
    assert all(len(prompts) == 1 for prompts in first.values())


def test_a_tenants_chats_share_its_system_prompt() -> None:
    """Two tenants share nothing."""
    owners: dict[int, set[str]] = {}
    for of in made("chat"):
        for prefix_id in of.prefix_ids:
            owners.setdefault(prefix_id, set()).add(of.tenant)
    assert owners
    assert all(len(tenants) == 1 for tenants in owners.values())
    assert {of.tenant for of in made("chat")} == {f"tenant-{number}" for number in range(4)}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"count": 0}, "count"),
        ({"rate_per_s": 0.0}, "rate_per_s"),
        ({"rate_per_s": float("nan")}, "rate_per_s"),
        ({"num_tenants": 0}, "num_tenants"),
        ({"scale": 0.0}, "scale"),
    ],
)
def test_settings_have_bounds(changes: dict[str, Any], field: str) -> None:
    """Named when they are not kept."""
    settings: dict[str, Any] = {"seed": 1, "count": 1, "rate_per_s": 1.0, **changes}
    with pytest.raises(ArrivalError, match=field):
        arrivals.generate("chat", Traffic(**settings))


def test_an_unknown_kind_is_refused() -> None:
    """With those that there are."""
    with pytest.raises(ArrivalError, match=r"prose: no kind.*chat, long, agents"):
        arrivals.generate("prose", Traffic(seed=1, count=1, rate_per_s=1.0))


def test_prompts_are_equal_where_their_prefix_ids_are() -> None:
    """And differ behind them, and from other ids' from the first block on."""

    def prompt(number: int, *ids: int, tokens: int = 50) -> tuple[int, ...]:
        arrival = Arrival(0.0, tokens, 1, prefix_ids=ids)
        return arrivals.prompt_token_ids(arrival, number, 16, 1_000)

    one, two = prompt(1, 7, 8), prompt(2, 7, 8)
    assert one[:32] == two[:32]
    assert one[32:] != two[32:]
    assert len(set(one)) > 25
    assert prompt(1, 7, 9)[:16] == one[:16]
    assert prompt(1, 7, 9)[16:32] != one[16:32]
    assert prompt(1, 8)[:16] != one[:16]
    assert len(one) == 50
    assert all(0 <= token < 1_000 for token in one)


def test_a_last_block_may_be_part_of_one() -> None:
    """As in the recorded traffic: its id covers what the prompt has of it."""
    arrival = Arrival(0.0, 20, 1, prefix_ids=(1, 2))
    longer = Arrival(0.0, 32, 1, prefix_ids=(1, 2))
    prompt = arrivals.prompt_token_ids(arrival, 0, 16, 100)
    assert len(prompt) == 20
    assert arrivals.prompt_token_ids(longer, 5, 16, 100)[:20] == prompt
