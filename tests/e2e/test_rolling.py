"""Two of everything: a standby leads when the leader goes, workers and gateways come and go.

Torch-free workers whose tokens follow from all tokens before them. A lease and a grace that are far
longer than the tests want to wait: what is given back is not waited out.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import redis

from benchmarks.client import Answer, Exchange
from benchmarks.stack import Process, Stack
from benchmarks.workload import Job
from servicekit import redis_keys
from tests.e2e.stack import (
    assert_equal_streams,
    assert_exact,
    assert_idle,
    await_workers,
    bodies,
    mend,
    slowed,
    start_streams,
    stub_stack_in,
    until,
)
from tests.e2e.test_failures import busiest, undisturbed, work_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LEASE_S, DRAIN_S = 5, 60
WORKER_EXIT_S = 10


@pytest.fixture(scope="module")
def _pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {
        "QUIRE_DRAIN_S": str(DRAIN_S),
        "QUIRE_LEASE_TTL_S": str(LEASE_S),
        "QUIRE_MAX_NUM_SEQS": "8",
    }
    folder = tmp_path_factory.mktemp("pairs")
    with stub_stack_in(folder, settings, schedulers=2, gateways=2) as stack:
        await_workers(stack, 2)
        yield stack


@pytest.fixture
def pairs(_pairs: Stack) -> Iterator[Stack]:
    """Whole and idle before and after."""
    mend(_pairs)
    assert_idle(_pairs)
    yield _pairs
    mend(_pairs)
    assert_idle(_pairs)


def leader_and_standby(stack: Stack) -> tuple[Process, Process]:
    """By the epoch, which is 0 for a standby."""
    first, second = stack.schedulers
    leads = first.metrics().total("quire:epoch") > 0
    return (first, second) if leads else (second, first)


def lease_holder(stack: Stack) -> bytes | None:
    """Who leads by Redis' word."""
    with redis.Redis(port=stack.redis_port) as client:
        return client.get(redis_keys.lease(stack.model_name))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_the_standby_takes_over_what_runs_and_what_waits(
    pairs: Stack, how: signal.Signals
) -> None:
    # More requests than slots: some run, some wait.
    work = work_for("standby", 24, output=(48, 80))
    expected = await undisturbed(pairs, work)
    leader, standby = leader_and_standby(pairs)
    holder = lease_holder(pairs)
    with slowed(pairs):
        streams = start_streams(pairs.client, bodies(pairs.model_name, work))
        await until(lambda: sum(count > 5 for count in streams.progress) >= 12)
        assert leader.metrics().total("vllm:num_requests_waiting") > 0
        leader.signal(how)
        code = await asyncio.to_thread(leader.wait)
    if how is signal.SIGTERM:
        assert code == 0
        assert lease_holder(pairs) != holder
    await asyncio.to_thread(standby.wait_event, "ready")
    answers = await streams.finish()
    assert_exact(work, answers)
    assert_equal_streams(answers, expected)


async def test_a_worker_that_drains_hands_over_and_leaves(pairs: Stack) -> None:
    work = work_for("drain", 8, output=(300, 350))
    expected = await undisturbed(pairs, work)
    with slowed(pairs):
        streams = start_streams(pairs.client, bodies(pairs.model_name, work))
        await streams.reach(5)
        worker, num_held = busiest(pairs.workers)
        assert num_held >= 3
        assert await asyncio.to_thread(worker.terminate, WORKER_EXIT_S) == 0
        assert not any(exchange.ended.done() for exchange in streams.watch)
    answers = await streams.finish()
    assert_exact(work, answers)
    assert_equal_streams(answers, expected)


async def test_a_worker_that_drains_while_nobody_leads_hands_over_to_the_next_leaders(
    pairs: Stack,
) -> None:
    work = work_for("both", 8, output=(300, 350))
    expected = await undisturbed(pairs, work)
    leader, standby = leader_and_standby(pairs)
    with slowed(pairs):
        streams = start_streams(pairs.client, bodies(pairs.model_name, work))
        await streams.reach(5)
        worker, num_held = busiest(pairs.workers)
        assert num_held >= 3
        leader.kill()
        worker.signal(signal.SIGTERM)
        await asyncio.to_thread(standby.wait_event, "ready")
        assert await asyncio.to_thread(worker.wait, WORKER_EXIT_S) == 0
    answers = await streams.finish()
    assert_exact(work, answers)
    assert_equal_streams(answers, expected)


async def test_a_worker_comes_and_goes_with_no_restart(pairs: Stack) -> None:
    work = work_for("come", 20, output=(150, 200))
    # Nobody's cache has these: they go to whom has least to do, however late the third one comes.
    fresh = work_for("fresh", 12, output=(150, 200))
    expected = await undisturbed(pairs, work)
    streams = start_streams(pairs.client, bodies(pairs.model_name, work))
    await until(lambda: sum(count > 0 for count in streams.progress) >= 16)
    third = pairs.add_worker()
    try:
        third.start()
        await asyncio.to_thread(third.wait_event, "ready")
        await asyncio.to_thread(await_workers, pairs, 3)
        # What waits goes to it, for both gateways.
        more = start_streams(pairs.client_of(pairs.gateways[1]), bodies(pairs.model_name, fresh))
        await until(lambda: third.metrics().total("quire:token_batches_total") > 0)
        await more.reach(1)
        assert await asyncio.to_thread(third.terminate, WORKER_EXIT_S) == 0
    finally:
        third.destroy()
        pairs.workers.remove(third)
    answers = await streams.finish()
    assert_exact(work, answers)
    assert_equal_streams(answers, expected)
    await asyncio.to_thread(await_workers, pairs, 2)
    assert_equal_streams(await more.finish(), await undisturbed(pairs, fresh))


@dataclass
class Load:
    """Clients that ask one after the other, always the gateway that `gateway` names."""

    stack: Stack
    gateway: Process
    work: list[Job]
    expected: list[Answer]
    stopped: bool = False
    num_answers: int = 0
    problems: list[str] = field(default_factory=list)
    open: dict[int, tuple[Process, list[Exchange]]] = field(default_factory=dict)

    async def client(self, number: int) -> None:
        """Until `stopped`."""
        bodies_of_work = bodies(self.stack.model_name, self.work)
        at = number
        while not self.stopped:
            at = (at + 1) % len(self.work)
            gateway = self.gateway
            watch: list[Exchange] = []
            self.open[number] = (gateway, watch)
            answer = await self.stack.client_of(gateway).complete(bodies_of_work[at], watch=watch)
            problem = answer.problem(self.work[at].num_output)
            if not problem and answer.token_ids != self.expected[at].token_ids:
                problem = "tokens differ"
            if problem:
                self.problems.append(f"request {at}: {problem}")
            self.num_answers += 1

    async def leave(self, gateway: Process, to: Process) -> None:
        """New requests go to another gateway; returns when each of the old ones is under way."""
        self.gateway = to

        def under_way() -> bool:
            mine = [watch for process, watch in self.open.values() if process is gateway]
            return all(watch and (watch[0].progress or watch[0].ended.done()) for watch in mine)

        await until(under_way)

    async def go_on(self, num_answers: int = 10) -> None:
        """Waits for more answers."""
        wanted = self.num_answers + num_answers
        await until(lambda: self.num_answers >= wanted)


@asynccontextmanager
async def load_on(stack: Stack, num_clients: int) -> AsyncIterator[Load]:
    """Ends the clients between two requests, and shows what went wrong."""
    work = work_for("rolling", 12, output=(32, 96))
    load = Load(stack, stack.gateways[0], work, await undisturbed(stack, work))
    async with asyncio.TaskGroup() as group:
        for number in range(num_clients):
            group.create_task(load.client(number))
        yield load
        load.stopped = True
    assert load.problems == []


async def restart(process: Process, then: str) -> None:
    """SIGTERM, a good end, and the same again."""
    assert await asyncio.to_thread(process.terminate, DRAIN_S) == 0
    process.start()
    await asyncio.to_thread(process.wait_event, then)


async def test_a_rolling_restart_of_everything_is_seen_by_no_client(pairs: Stack) -> None:
    async with load_on(pairs, num_clients=12) as load:
        await load.go_on()
        leader, standby = leader_and_standby(pairs)
        standby.kill()
        await load.go_on()
        standby.start()
        await asyncio.to_thread(standby.wait_event, "standing_by")
        for scheduler in (standby, leader):
            await restart(scheduler, "standing_by")
            await load.go_on()
        for worker in list(pairs.workers):
            await restart(worker, "ready")
            await asyncio.to_thread(await_workers, pairs, 2)
            await load.go_on()
        first, second = pairs.gateways
        for gateway, other in ((first, second), (second, first)):
            await load.leave(gateway, to=other)
            await restart(gateway, "ready")
            await asyncio.to_thread(pairs.wait_ready)
            await load.go_on()
        await load.go_on(12)
