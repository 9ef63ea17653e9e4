"""The virtual loop: time jumps, order holds, processes pause and die."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from scheduler_svc.sim.loop import Process, StandstillError, VirtualLoop


def run(work: Callable[[VirtualLoop], Coroutine[Any, Any, Any]]) -> Any:
    """In a loop of its own, which is wound up."""
    loop = VirtualLoop()
    try:
        return loop.run(work(loop))
    finally:
        loop.wind_up()


def test_time_jumps_to_the_next_timer() -> None:
    """A year takes no time."""

    async def work(loop: VirtualLoop) -> float:
        await asyncio.sleep(365 * 86400)
        return loop.time()

    assert run(work) == 365 * 86400


def test_what_is_due_at_once_keeps_its_order() -> None:
    """Also where one asked for it in between."""
    seen: list[int] = []

    async def work(loop: VirtualLoop) -> None:
        for number in range(20):
            loop.call_later(1.0, seen.append, number)
        await asyncio.sleep(2.0)

    run(work)
    assert seen == list(range(20))


def test_a_timeout_is_of_virtual_time() -> None:
    """And what it ends has had its time."""

    async def work(loop: VirtualLoop) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await asyncio.Event().wait()
        return loop.time()

    assert run(work) == 30.0


def test_standing_still_is_an_error() -> None:
    """Not an endless wait."""

    async def work(_: VirtualLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(StandstillError):
        run(work)


def test_a_moment_does_not_last_for_ever() -> None:
    """Callbacks that ask for each other at once are an error, not a run without end."""
    loop = VirtualLoop(max_at_once=1000)

    def again() -> None:
        loop.call_soon(again)

    async def work() -> None:
        await asyncio.sleep(2.0)
        again()
        await asyncio.sleep(1.0)

    try:
        with pytest.raises(StandstillError, match=r"at 2\.000 s: more than 1000"):
            loop.run(work())
    finally:
        loop.wind_up()


def test_many_callbacks_over_time_are_no_standstill() -> None:
    """The bound is for each moment anew."""
    loop = VirtualLoop(max_at_once=20)

    async def work() -> None:
        for _ in range(100):
            await asyncio.sleep(0.1)

    loop.run(work())
    loop.wind_up()
    assert loop.num_callbacks > 100


async def _ticks(loop: VirtualLoop, seen: list[float]) -> None:
    try:
        while True:
            seen.append(loop.time())
            await asyncio.sleep(1.0)
    finally:
        seen.append(-1.0)


def test_a_paused_process_catches_up() -> None:
    """What was due meanwhile is done once it goes on; others have gone on."""
    seen: list[float] = []
    other: list[float] = []

    async def work(loop: VirtualLoop) -> None:
        process = Process(loop, "p")
        process.start(_ticks(loop, seen))
        Process(loop, "q").start(_ticks(loop, other))
        await asyncio.sleep(1.5)
        process.pause()
        await asyncio.sleep(3.0)
        process.resume()
        await asyncio.sleep(1.2)
        assert seen == [0.0, 1.0, 4.5, 5.5]
        assert other == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

    run(work)


def test_a_dead_process_does_nothing_more() -> None:
    """Not even what stands in `finally`, before the world is wound up; nor do tasks it began."""
    seen: list[float] = []

    async def parent(loop: VirtualLoop) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(_ticks(loop, seen))

    async def work(loop: VirtualLoop) -> None:
        process = Process(loop, "p")
        process.start(parent(loop))
        await asyncio.sleep(1.5)
        process.kill()
        process.resume()
        await asyncio.sleep(5.0)
        assert seen == [0.0, 1.0]

    run(work)


def test_a_failure_ends_the_run() -> None:
    """Whoever says it, and even if its task goes on."""

    async def work(loop: VirtualLoop) -> None:
        loop.call_later(1.0, loop.fail, ValueError("broken"))
        await asyncio.sleep(100.0)

    with pytest.raises(ValueError, match="broken"):
        run(work)


def test_tasks_hash_by_their_number() -> None:
    """So that sets of them are walked in the same order in every process."""

    async def work(loop: VirtualLoop) -> list[int]:
        tasks = [loop.create_task(asyncio.sleep(0)) for _ in range(3)]
        await asyncio.gather(*tasks)
        return [hash(task) - hash(tasks[0]) for task in tasks]

    assert run(work) == [0, 1, 2]
