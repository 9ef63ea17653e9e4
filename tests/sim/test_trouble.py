"""What goes wrong in a world: faults that overlap, commands done late, keys that run out."""

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest
from redis.exceptions import RedisError, ResponseError

from gateway.adapters.queue_redis import ADMIT
from scheduler_svc.adapters import redis_scripts
from scheduler_svc.sim import redis_clients
from scheduler_svc.sim.loop import Process, VirtualLoop
from scheduler_svc.sim.network import Network, SimChannel
from scheduler_svc.sim.redis_clients import RedisClient
from scheduler_svc.sim.redis_model import RedisServer
from scheduler_svc.sim.redis_trouble import Outage

Work = Callable[[RedisServer, RedisClient], Coroutine[Any, Any, Any]]


def run(work: Work) -> Any:
    """With a server and a client of it, in a loop of its own."""
    loop = VirtualLoop()
    server = RedisServer(loop, Random("redis"))
    try:
        return loop.run(work(server, RedisClient(server, "p")))
    finally:
        loop.wind_up()


async def fails(client: RedisClient) -> bool:
    """Whether a command does."""
    try:
        await client.mget(["key"])
    except RedisError:
        return True
    return False


def test_an_outage_that_ends_leaves_the_others() -> None:
    """Each counts what it hit, and only that."""

    async def work(server: RedisServer, client: RedisClient) -> None:
        first, second, another = Outage(), Outage(), Outage(process="q")
        for outage in (first, second, another):
            server.go(outage)
        assert await fails(client)
        server.trouble.end(second)
        assert await fails(client)
        server.trouble.end(first)
        assert not await fails(client)
        assert (first.num_hit, second.num_hit, another.num_hit) == (1, 1, 0)

    run(work)


def test_lost_answers_end_each_for_itself() -> None:
    """The commands are done all the same."""

    async def work(server: RedisServer, client: RedisClient) -> None:
        first, second = server.trouble.lose(1), server.trouble.lose(2)
        server.trouble.lose_no_more(first)
        assert [await fails(client) for _ in range(3)] == [True, True, False]
        assert (first.num_hit, second.num_hit) == (0, 2)

    run(work)


@pytest.mark.parametrize(("share", "is_done"), [(1.0, True), (0.0, False)])
def test_a_command_that_was_given_up_may_be_done_when_the_server_wakes(
    share: float, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has been told that it has failed."""
    monkeypatch.setattr(redis_clients, "LATE_SHARE", share)

    async def work(server: RedisServer, client: RedisClient) -> None:
        server.set("key", "value")
        outage = Outage(hangs=True)
        server.go(outage)
        with pytest.raises(RedisError):
            await client.delete("key")
        assert server.get("key") is not None
        server.trouble.end(outage)
        assert (server.get("key") is None) is is_done

    run(work)


def test_a_command_that_still_waits_is_answered_when_the_server_wakes() -> None:
    """A short hang is only slow."""

    async def work(server: RedisServer, client: RedisClient) -> float:
        outage = Outage(hangs=True)
        server.go(outage)
        server.loop.call_later(1.0, server.trouble.end, outage)
        assert not await fails(client)
        return server.loop.time()

    assert run(work) == pytest.approx(1.0, abs=0.01)


def finish(server: RedisServer, entries: list[bytes], notices: list[bytes], cap: int) -> Any:
    """FINISH as its outbox sends it, of epoch 1; notices live for 10 s."""
    server.set("epoch", "1")
    pairs = [part for notice in notices for part in (3, notice)]
    args = ["1", "group", cap, 10_000, len(entries), *entries, *pairs]
    return server.eval(redis_scripts.FINISH, 3, "epoch", "requests", "notices", *args)


def test_a_finish_without_entries_is_an_error() -> None:
    """As XACK without ids is one in Lua."""

    async def work(server: RedisServer, _: RedisClient) -> None:
        with pytest.raises(ResponseError):
            finish(server, [], [b"notice"], 100)

    run(work)


def test_notices_are_capped_and_run_out() -> None:
    """Both as FINISH says."""

    async def work(server: RedisServer, _: RedisClient) -> None:
        entry = server.xadd("requests", ["entry", b"x"])
        finish(server, [entry], [b"%d" % n for n in range(5)], 3)
        found = server.after("notices", "0", 10)
        assert [fields[b"notice"] for _, fields in found] == [b"2", b"3", b"4"]
        await asyncio.sleep(9.9)
        assert server.num_entries("notices") == 3
        await asyncio.sleep(0.2)
        assert server.num_entries("notices") == 0

    run(work)


def test_a_backlog_runs_out() -> None:
    """A queue that nobody reads is not full for ever."""

    async def work(server: RedisServer, _: RedisClient) -> None:
        server.set("epoch", "1")
        backlog = ("1", 10, 5000, 100, 10_000)
        server.eval(redis_scripts.BACKLOG, 2, "epoch", "backlog", *backlog)
        admit = (2, "requests", "backlog", 100, 1000, 1, "wake", b"entry", 1000)
        assert server.eval(ADMIT, *admit)[0] == 0
        await asyncio.sleep(10.1)
        assert server.eval(ADMIT, *admit)[0] == 1

    run(work)


def test_a_jump_counts_the_keys_that_run_out_by_it() -> None:
    """One that moves nothing is no fault."""

    async def work(server: RedisServer, _: RedisClient) -> None:
        server.set("lease", "holder", 1500)
        server.set("epoch", "1")
        assert [server.jump(seconds) for seconds in (-5, 1, 3, 3, 60)] == [0, 0, 0, 1, 0]

    run(work)


def test_a_process_goes_on_when_nobody_pauses_it_any_more() -> None:
    """Two stand-stills that overlap are one."""
    loop = VirtualLoop()
    process = Process(loop, "p")
    process.pause()
    process.pause()
    process.resume()
    assert process.paused
    process.resume()
    assert not process.paused
    process.pause()
    process.pause()
    process.resume(whoever_paused=True)
    assert not process.paused
    loop.close()


def test_a_cut_that_is_mended_leaves_the_others() -> None:
    """Of one link, whatever their kinds."""
    loop = VirtualLoop()
    network = Network(loop, Random(1))
    link = network.link("a", "b")
    delivered: list[int] = []
    for silent in (True, True, False):
        network.cut("a", "b", silent=silent)
    link.hold(delivered.append, 1)
    network.heal("a", "b", silent=True)
    assert (link.silent, link.down, delivered) == (True, True, [])
    network.heal("a", "b", silent=False)
    assert (link.silent, link.down, delivered) == (True, False, [])
    network.heal("a", "b", silent=True)
    assert (link.silent, link.num_held, delivered) == (False, 1, [1])
    loop.close()


def test_what_tampers_with_messages_ends_for_itself() -> None:
    """And each sees what the ones before have left."""
    loop = VirtualLoop()
    network = Network(loop, Random(1))
    channel = SimChannel(network, "client", "server")

    def twice(_: str, raw: bytes) -> list[tuple[bytes, float]]:
        return [(raw, 0.0), (raw, 0.0)]

    def late(_: str, raw: bytes) -> list[tuple[bytes, float]]:
        return [(raw, 1.5)]

    network.tamper("server", twice)
    network.tamper("server", late)
    assert network.tampered(channel, "path", b"m") == [(b"m", 1.5), (b"m", 1.5)]
    network.tamper_no_more("server", twice)
    assert network.tampered(channel, "path", b"m") == [(b"m", 1.5)]
    loop.close()
