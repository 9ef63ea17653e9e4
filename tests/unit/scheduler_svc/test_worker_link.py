"""A link to one worker between two of its lives. The streams are made up, the time is virtual."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from quire.v1 import worker_pb2

from scheduler_svc import codec
from scheduler_svc.adapters import loss_rules, worker_link
from scheduler_svc.adapters.refusals import Refusals
from scheduler_svc.adapters.worker_link import WorkerLink
from scheduler_svc.core.events import Event, WorkerJoined, WorkerLost
from scheduler_svc.ports import WorkerRecord
from scheduler_svc.sim.loop import VirtualLoop
from scheduler_svc.sim.scheduler import Observer
from tests.unit.scheduler_svc.test_worker_life import WORKER, plan

S = 1_000_000_000
# The loss rules are looked at so often; heartbeats come more often than anyone calls silence.
CHECK_S, HEARTBEAT_S = 0.05, 0.5


class Stream:
    """A session as the link holds it. The test speaks for the worker at its other end."""

    def __init__(self, incarnation: int) -> None:
        self.plans: list[int] = []
        # The worker takes messages while this is set.
        self.flows = asyncio.Event()
        self.flows.set()
        self._said: asyncio.Queue[bytes] = asyncio.Queue()
        self.say(
            hello=worker_pb2.Hello(
                min_schema_revision=codec.SCHEMA_REVISION,
                max_schema_revision=codec.SCHEMA_REVISION,
                worker_id=WORKER,
                incarnation=incarnation,
                cache_groups=[worker_pb2.CacheGroup(block_size=4, num_device_blocks=64)],
                num_slots=8,
                max_num_batched_tokens=64,
                max_model_len=1024,
            )
        )
        self.say(snapshot=worker_pb2.Snapshot(last=True))
        self.say(heartbeat=worker_pb2.Heartbeat())

    def say(self, **message: Any) -> None:
        """The worker sends it."""
        self._said.put_nowait(worker_pb2.SessionResponse(**message).SerializeToString())

    async def write(self, raw: bytes) -> None:
        """The link sends."""
        await self.flows.wait()
        message = worker_pb2.SessionRequest.FromString(raw)
        if message.HasField("plan"):
            self.plans.append(message.plan.step)

    async def read(self) -> bytes:
        """The link waits for the worker."""
        return await self._said.get()


class Channel:
    """What dialling gives."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def stream_stream(self, _: str) -> Callable[[], Stream]:
        """The method, which is called once."""
        return lambda: self._stream


class Bench:
    """A link with its task and the loss rules' clock; `incarnation` is who answers it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.incarnation = 1
        self.dialled: list[str] = []
        self.streams: list[Stream] = []
        self.events: list[Event] = []
        self.link = WorkerLink(
            self.record(1),
            refusals=Refusals(1, 0),
            grace_ns=30 * S,
            clock=loop,
            sink=self,
            observer=Observer(loop),
            check_digest=lambda _worker_id, _digest: None,
            dial=self._dial,
        )
        self._tasks = [
            loop.create_task(work) for work in (self.link.run(), self._check(), self._beat())
        ]

    @staticmethod
    def record(incarnation: int) -> WorkerRecord:
        """The registry's, each incarnation at an address of its own."""
        return WorkerRecord(
            worker_id=WORKER,
            incarnation=incarnation,
            address=f"address {incarnation}",
            model_digest="",
        )

    async def put(self, event: Event) -> None:
        """EventSink."""
        self.events.append(event)

    async def joined(self, count: int) -> Stream:
        """The session of the count-th life, once plans may be sent."""
        await self._saw(WorkerJoined, count)
        await asyncio.sleep(0.01)
        return self.streams[-1]

    async def lost(self, count: int) -> None:
        """Waits for the count-th loss."""
        await self._saw(WorkerLost, count)

    def send(self, step: int, *, reset: bool = False) -> None:
        """A plan of the core's."""
        self.link.send(replace(plan(step), reset=reset))

    async def _saw(self, kind: type[Event], count: int) -> None:
        async with asyncio.timeout(1000.0):
            while sum(isinstance(event, kind) for event in self.events) < count:  # noqa: ASYNC110
                await asyncio.sleep(CHECK_S)

    def _dial(self, address: str) -> Any:
        self.dialled.append(address)
        self.streams.append(Stream(self.incarnation))
        return Channel(self.streams[-1])

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self.link.check(self.loop.now_ns())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self.streams:
                self.streams[-1].say(heartbeat=worker_pb2.Heartbeat())


def run(work: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    """In a loop of its own."""
    loop = VirtualLoop()

    async def begin() -> None:
        await work(Bench(loop))

    try:
        loop.run(begin())
    finally:
        loop.wind_up()


def test_plans_of_a_life_that_is_over_do_not_go_to_the_next() -> None:
    """Whether they wait for a worker that takes nothing or for a stream that is gone."""

    async def work(bench: Bench) -> None:
        stream = await bench.joined(1)
        bench.send(1, reset=True)
        await asyncio.sleep(0.01)
        stream.flows.clear()
        for step in (2, 3, 4):
            bench.send(step)
        bench.link.give_up("planted")
        bench.send(5)
        await bench.lost(1)
        bench.send(6)
        stream = await bench.joined(2)
        bench.send(7, reset=True)
        await asyncio.sleep(0.01)
        assert [stream.plans for stream in bench.streams] == [[1], [7]]

    run(work)


def test_an_incarnation_that_is_dead_is_not_believed_in_again() -> None:
    """The registry may name it for a while after its successor has answered."""

    async def work(bench: Bench) -> None:
        await bench.joined(1)
        bench.link.announced(bench.record(2))
        bench.incarnation = 2
        await bench.joined(2)
        bench.link.announced(bench.record(1))
        bench.send(1, reset=True)
        await asyncio.sleep(worker_link.DIAL_PAUSE_S)
        assert bench.dialled == ["address 1", "address 2"]
        assert bench.streams[-1].plans == [1]
        assert sum(isinstance(event, WorkerLost) for event in bench.events) == 1

    run(work)


def test_each_loss_over_a_step_that_does_not_end_doubles_the_patience() -> None:
    """Up to a bound, and only with the same incarnation: the next may be a quicker one."""

    async def work(bench: Bench) -> None:
        async def time_to_loss(number: int) -> int:
            await bench.joined(number)
            begin_ns = bench.loop.now_ns()
            bench.send(number, reset=True)
            await bench.lost(number)
            return round((bench.loop.now_ns() - begin_ns) / loss_rules.STUCK_NS)

        doubled = [await time_to_loss(number) for number in range(1, 7)]
        assert doubled == [1, 2, 4, 8, 16, loss_rules.MAX_PATIENCE]
        await bench.joined(7)
        bench.incarnation = 2
        bench.link.announced(bench.record(2))
        assert await time_to_loss(8) == 1

    run(work)
