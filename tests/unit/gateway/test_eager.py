"""Awaitables that are begun at once: they end there, or go on in a task as if begun in it."""

import asyncio

import pytest

from gateway.rest import eager


async def test_what_does_not_wait_has_ended_at_once() -> None:
    found = []

    async def work() -> None:
        found.append("done")

    assert eager.begin(work()) is None
    assert found == ["done"]


async def test_what_waits_goes_on_in_a_task() -> None:
    """However often it waits."""
    gates, found = [asyncio.Event(), asyncio.Event()], []

    async def work() -> None:
        for number, gate in enumerate(gates):
            found.append(number)
            await gate.wait()
            # Its own timer needs a task, which it has from the first wait on.
            async with asyncio.timeout(20):
                await asyncio.sleep(0)
        found.append(len(gates))

    rest = eager.begin(work())
    assert rest is not None
    assert found == [0]

    async def go_on() -> None:
        await rest

    task = asyncio.get_running_loop().create_task(go_on())
    for gate, so_far in zip(gates, ([0], [0, 1]), strict=True):
        await asyncio.sleep(0)
        assert found == so_far
        gate.set()
        for _ in range(5):
            await asyncio.sleep(0)
    await task
    assert found == [0, 1, 2]


async def test_errors_come_where_it_runs() -> None:
    gate = asyncio.Event()

    async def work(*, late: bool) -> None:
        if late:
            await gate.wait()
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        eager.begin(work(late=False))
    rest = eager.begin(work(late=True))
    assert rest is not None
    gate.set()
    with pytest.raises(OSError, match="gone"):
        await rest


@pytest.mark.parametrize("begun", [False, True])
async def test_it_ends_with_its_task_or_when_it_is_given_up(begun: bool) -> None:
    """It is told so where it waits."""
    told: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.append("cancelled")
            raise
        finally:
            told.append("over")

    rest = eager.begin(work())
    assert rest is not None
    if not begun:
        rest.close()
        assert told == ["over"]
        return

    async def go_on() -> None:
        await rest

    task = asyncio.get_running_loop().create_task(go_on())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert told == ["cancelled", "over"]
