"""What comes and goes in a world: gateways, workers, Redis' last writes; and log probabilities."""

import asyncio
from random import Random
from typing import Any

import pytest

from gateway.core.stream import Fed, StreamState
from gateway.engine import Engine
from scheduler_svc.sim.__main__ import quiet, run_seeds
from scheduler_svc.sim.faults import FORGETS
from scheduler_svc.sim.loop import VirtualLoop
from scheduler_svc.sim.redis_model import RedisServer
from scheduler_svc.sim.world import Options, World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
KINDS = ("worker comes", "gateway comes", "gateway drains", "gateway dies", FORGETS)


@pytest.mark.parametrize("kind", KINDS)
def test_it_breaks_no_promise(kind: str) -> None:
    """And comes about."""
    # Of what comes there is a bound, and faults go on until enough have taken effect.
    num_seeds = 1 if kind.endswith("comes") else 3
    outcomes = run_seeds(range(num_seeds), Options(only=kind))
    assert [f"{o.seed}: {o.rule} {o.detail}" for o in outcomes if o.rule] == []
    assert sum(outcome.faults[kind] for outcome in outcomes) > 0


async def _drains(world: World) -> None:
    await asyncio.sleep(0.5)
    assert world.gateways[0].now.engine.num_live
    world.gateways[0].now.drain()
    await asyncio.sleep(6.0)
    assert world.gateways[0].now.drained is False, "it has not been started anew"


async def _drains_while_workers_are_slow(world: World) -> None:
    for worker in world.workers:
        worker.now.runner.slowed.append(60.0)
    await _drains(world)


def test_who_asks_a_gateway_that_drains_is_served_by_another() -> None:
    """What runs ends; nothing is left over of a gateway that has gone."""
    with quiet():
        outcome = World(1, Options(), plot=_drains).run()
    assert outcome.rule == "", outcome.detail
    assert outcome.num_refused > 0
    assert not outcome.ends.keys() & {"UNAVAILABLE", "connection lost"}


def test_what_runs_for_longer_than_the_grace_has_an_explicit_end() -> None:
    """Nobody's connection is lost."""
    with quiet():
        outcome = World(1, Options(), plot=_drains_while_workers_are_slow).run()
    assert outcome.rule == "", outcome.detail
    assert outcome.ends["UNAVAILABLE"] > 0
    assert outcome.ends["connection lost"] == 0


def test_a_gateway_that_does_not_wait_for_its_streams_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its clients would lose their connections."""

    async def at_once(self: Engine, _: float) -> None:
        self.draining = True

    monkeypatch.setattr(Engine, "drain", at_once)
    with quiet():
        outcome = World(1, Options(), plot=_drains_while_workers_are_slow).run()
    assert outcome.rule == "a gateway that drains ends each of its streams", outcome.detail


async def _loses_what_nobody_has_read(world: World) -> None:
    for scheduler in world.schedulers:
        scheduler.now.process.pause()
    saved = world.redis.saved()
    await asyncio.sleep(0.8)
    lost, _ = world.redis.forget(saved)
    assert lost
    for scheduler in world.schedulers:
        scheduler.now.process.resume()


def test_what_redis_has_lost_unread_breaks_a_promise_unless_it_is_known() -> None:
    """It ends at its deadline, which is a promise for such requests only."""
    with quiet():
        outcome = World(1, Options(only=FORGETS), plot=_loses_what_nobody_has_read).run()
    assert outcome.rule == "an undisturbed request ends by itself"
    assert "DEADLINE" in outcome.detail


def test_a_server_that_dies_knows_what_its_file_held() -> None:
    """Entries, groups, strings, members; ids go on, and who waits goes on waiting."""
    loop = VirtualLoop()
    server = RedisServer(loop, Random("redis"))

    async def work() -> None:
        server.xgroup_create("stream")
        kept = server.xadd("stream", ["entry", b"kept"])
        server.set("string", "old")
        saved = server.saved()
        server._remove("stream", [kept])
        lost = server.xadd("stream", ["entry", b"lost"])
        server.set("string", "new")
        server.set("other", "new")
        waiter = server.waiter("stream")
        assert server.forget(saved) == ([[b"entry", b"lost"]], 1)
        assert [i for i, _ in server.after("stream", "0", 10)] == [kept]
        assert (server.get("string"), server.get("other")) == (b"old", None)
        assert not waiter.done()
        assert server.xadd("stream", ["entry", b"next"]) > lost
        assert waiter.done()

    try:
        loop.run(work())
    finally:
        loop.wind_up()


def test_log_probabilities_are_asked_for_and_compared() -> None:
    """Without faults and with them."""
    for only in ("", None):
        [outcome] = run_seeds([3], Options(only=only))
        assert outcome.rule == "", outcome.detail
        assert outcome.num_scored > 50


def test_a_log_probability_of_another_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though each token has one: of several that come at once, in the wrong order."""
    feed: Any = StreamState.feed

    def backwards(self: StreamState, *args: Any) -> Fed:
        *others, logprobs = args
        return feed(self, *others, logprobs[::-1])

    monkeypatch.setattr(StreamState, "feed", backwards)
    found = (run_seeds([seed], Options())[0].rule for seed in range(15, 25))
    assert "each token comes with its own log probability" in found
