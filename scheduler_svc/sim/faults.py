"""What goes wrong in a world, by seed, and whether it took effect.

A fault is drawn, begins, and is mended after a while, at the latest when the world heals; others of
its kind that go on are left as they are. It counts under its kind only if it changed something
itself: it dropped a message, held one back, broke a stream, failed a command, let a key run out, or
a step was under way where it killed a worker, a request open where it killed a leader. KINDS names
them all; a run over many seeds in which one of them never took effect has tested less than it says.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING

from quire.v1 import queue_pb2, worker_pb2

from scheduler_svc.sim.redis_trouble import Outage
from scheduler_svc.sim.worker import SESSION

if TYPE_CHECKING:
    from scheduler_svc.sim.world import World

POISON, JUMPS = "poison", "clock jump"
FORGETS, DIES = "redis loses its last writes", "gateway dies"
# By which a slow worker may take longer.
SLOWNESS = (3.0, 10.0, 60.0, 200.0)
KINDS = (
    "lost result", "late result", "repeated result", "worker dies", "worker stands still",
    "worker is slow", "scheduler-worker reset", "scheduler-worker silent", "worker-gateway reset",
    "worker-gateway silent", "redis away", "redis hangs", "redis answer lost",
    FORGETS, "leader cut off from redis", "leader stands still", "leader dies", "leader drains",
    "worker drains", "worker comes", DIES, "gateway drains", "gateway comes",
    "cancel storm", JUMPS, POISON,
)  # fmt: skip
MAX_FAULTS = 40
MIN_EFFECTS = 3
FEW_OPEN = 8


class Faults:
    """Owns chance and counts of faults."""

    def __init__(self, world: "World", random: Random) -> None:
        self._world = world
        self._random = random
        self.effects: Counter[str] = Counter()
        self._forgetting = False
        self._menu: dict[str, Callable[[], Awaitable[bool]]] = {
            "lost result": lambda: self._tamper("lost"),
            "late result": lambda: self._tamper("late"),
            "repeated result": lambda: self._tamper("repeated"),
            "worker dies": self._worker_dies,
            "worker stands still": self._worker_pauses,
            "worker is slow": self._worker_slow,
            "scheduler-worker reset": lambda: self._cut("scheduler", silent=False),
            "scheduler-worker silent": lambda: self._cut("scheduler", silent=True),
            "worker-gateway reset": lambda: self._cut("gateway", silent=False),
            "worker-gateway silent": lambda: self._cut("gateway", silent=True),
            "redis away": lambda: self._redis_away(hangs=False),
            "redis hangs": lambda: self._redis_away(hangs=True),
            "redis answer lost": self._answer_lost,
            FORGETS: self._redis_forgets,
            "leader cut off from redis": self._leader_cut_off,
            "leader stands still": self._leader_pauses,
            "leader dies": self._leader_dies,
            "leader drains": self._leader_drains,
            "worker drains": self._worker_drains,
            "worker comes": self._worker_comes,
            DIES: self._gateway_dies,
            "gateway drains": self._gateway_drains,
            "gateway comes": self._gateway_comes,
            "cancel storm": self._cancel_storm,
            JUMPS: self._clock_jump,
        }
        assert {*self._menu, POISON} == {*KINDS}

    async def run(self, over_s: float, only: str | None) -> None:
        """Faults while requests come, and on until enough have taken effect."""
        random, loop = self._random, self._world.loop
        left_out = {JUMPS if self._world.forgetful else FORGETS}
        if not self._world.gateways_die:
            left_out.add(DIES)
        kinds = [kind for kind in self._menu if kind == (only or kind) and kind not in left_out]
        # Where they may come at all they come more often than the others.
        kinds += 2 * [kind for kind in (FORGETS, DIES) if kind in kinds]
        mean_s = random.choice((0.15, 0.3, 0.6))
        for _ in range(MAX_FAULTS):
            enough = sum(self.effects.values()) >= MIN_EFFECTS
            if enough and (loop.time() > over_s or not self._world.clients.num_open):
                break
            if not enough and self._world.clients.num_open < FEW_OPEN:
                self._world.ask_more()
            await asyncio.sleep(min(random.expovariate(1 / mean_s), 1.5))
            kind = random.choice(kinds)
            self._world.process.start(self._one(kind))
        await asyncio.sleep(0.01)  # so that the last one has begun before it is mended

    async def _one(self, kind: str) -> None:
        self._world.journal.note("fault", kind)
        if await self._menu[kind]():
            self.effects[kind] += 1
            self._world.journal.note("fault", f"{kind} took effect")

    def _seconds(self, least: float, most: float) -> float:
        """Short ones are likely."""
        return least + (most - least) * self._random.random() ** 2

    # Workers and their messages

    async def _tamper(self, how: str) -> bool:
        world, worker = self._world, self._random.choice(self._world.workers)
        done = 0
        late_s = self._seconds(0.05, 3.0)

        def tamper(path: str, raw: bytes) -> list[tuple[bytes, float]]:
            nonlocal done
            is_result = path == SESSION and worker_pb2.SessionResponse.FromString(raw).HasField(
                "result"
            )
            if done or not is_result:
                return [(raw, 0.0)]
            done = 1
            world.journal.note(worker.name, f"a result is {how}")
            parts = {"lost": [], "late": [(raw, late_s)], "repeated": [(raw, 0.0), (raw, 0.0)]}
            return parts[how]

        world.network.tamper(worker.name, tamper)
        await asyncio.sleep(1.0)
        world.network.tamper_no_more(worker.name, tamper)
        return bool(done)

    async def _worker_dies(self) -> bool:
        worker = self._random.choice(self._world.workers)
        busy = worker.alive and worker.now.executor.busy
        worker.die(self._seconds(0.05, 2.5))
        return busy

    async def _worker_pauses(self) -> bool:
        worker = self._random.choice(self._world.workers)
        if not worker.alive:
            return False
        process, busy = worker.now.process, worker.now.executor.busy
        process.pause()
        await asyncio.sleep(self._seconds(0.1, 4.0))
        process.resume()
        return busy

    async def _worker_slow(self) -> bool:
        worker = self._random.choice(self._world.workers)
        if not worker.alive:
            return False
        now, before = worker.now, worker.now.executor.num_steps
        slowness = self._random.choice(SLOWNESS)
        now.runner.slowed.append(slowness)
        await asyncio.sleep(self._seconds(0.3, 2.0))
        if slowness in now.runner.slowed:
            now.runner.slowed.remove(slowness)
        return now.executor.busy or now.executor.num_steps > before

    async def _cut(self, side: str, *, silent: bool) -> bool:
        world = self._world
        worker = self._random.choice(world.workers)
        others = world.schedulers if side == "scheduler" else world.gateways
        other = self._random.choice([one.name for one in others])
        link = world.network.link(worker.name, other)
        num_held = link.num_held
        num_hit = world.network.cut(worker.name, other, silent=silent)
        await asyncio.sleep(self._seconds(0.05, 4.0))
        num_held = link.num_held - num_held
        world.network.heal(worker.name, other, silent=silent)
        return num_held > 0 if silent else num_hit > 0

    # Redis

    async def _redis_away(self, *, hangs: bool) -> bool:
        outage = Outage(hangs=hangs)
        self._world.redis.go(outage)
        await asyncio.sleep(self._seconds(0.1, 4.0))
        self._world.redis.trouble.end(outage)
        return outage.num_hit > 0

    async def _answer_lost(self) -> bool:
        trouble = self._world.redis.trouble
        lost = trouble.lose(self._random.randint(1, 4))
        await asyncio.sleep(0.5)
        trouble.lose_no_more(lost)
        return lost.num_hit > 0

    async def _redis_forgets(self) -> bool:
        world = self._world
        if self._forgetting:
            return False
        self._forgetting = True
        saved = world.redis.saved()
        await asyncio.sleep(self._random.uniform(0.05, 1.0))
        self._forgetting = False
        if world.healed:
            return False
        lost, num_back = world.redis.forget(saved)
        world.journal.note("redis", f"loses {len(lost)} entries, {num_back} come back")
        world.forgotten.update(_request_id(flat) for flat in lost)
        outage = Outage(restarts=True)
        world.redis.go(outage)
        await asyncio.sleep(self._seconds(0.3, 2.0))
        world.redis.trouble.end(outage)
        return bool(lost or num_back)

    async def _leader_cut_off(self) -> bool:
        leader = self._world.leader
        if leader is None:
            return False
        redis, epoch = self._world.redis, leader.now.epoch
        outage = Outage(process=leader.name)
        redis.go(outage)
        await asyncio.sleep(self._seconds(1.0, 4.0))
        redis.trouble.end(outage)
        return outage.num_hit > 0 and self._world.highest_epoch > epoch

    async def _clock_jump(self) -> bool:
        # Backwards it makes a dead leader's lease live on for as long.
        seconds = self._random.choice((-5, -1, 1, 3, 10, 60))
        return self._world.redis.jump(seconds) > 0

    # Schedulers and clients

    async def _leader_pauses(self) -> bool:
        leader = self._world.leader
        if leader is None:
            return False
        process, epoch = leader.now.process, leader.now.epoch
        process.pause()
        await asyncio.sleep(self._seconds(1.6, 5.0))
        taken_over = self._world.highest_epoch > epoch
        process.resume()
        return taken_over

    async def _leader_dies(self) -> bool:
        leader = self._world.leader
        if leader is None:
            return False
        view = leader.now.view
        busy = view is not None and view.num_waiting + view.num_running + view.num_swapped > 0
        leader.die(self._seconds(0.2, 3.0))
        return busy

    async def _leader_drains(self) -> bool:
        leader = self._world.leader
        if leader is None:
            return False
        now, epoch = leader.now, leader.now.epoch
        now.stop()
        await asyncio.sleep(1.0)
        return now.process.dead and self._world.highest_epoch > epoch

    async def _worker_drains(self) -> bool:
        worker = self._random.choice(self._world.workers)
        if not worker.alive or worker.now.process.paused:
            return False
        now, num_rows = worker.now, worker.now.num_live_rows
        now.drain()
        for _ in range(20):
            await asyncio.sleep(0.2)
            if now.process.dead:
                break
        return num_rows > 0 and now.drained

    async def _worker_comes(self) -> bool:
        worker = self._world.add_worker()
        if worker is None:
            return False
        now = worker.now
        return await self._soon(lambda: now.executor.num_steps > 0)

    async def _gateway_dies(self) -> bool:
        gateway = self._random.choice(self._world.gateways)
        busy = gateway.alive and gateway.now.engine.num_live > 0
        gateway.die(self._seconds(0.2, 3.0))
        return busy

    async def _gateway_drains(self) -> bool:
        gateway = self._random.choice(self._world.gateways)
        if not gateway.alive:
            return False
        now, num_live = gateway.now, gateway.now.engine.num_live
        now.drain()
        return await self._soon(lambda: now.process.dead) and num_live > 0 and now.drained

    async def _gateway_comes(self) -> bool:
        world = self._world
        gateway = world.add_gateway()
        if gateway is None:
            return False
        now = gateway.now
        world.ask_more(gateway)
        return await self._soon(
            lambda: any(a.gateway is now and a.given for a in world.clients.answers)
        )

    async def _soon(self, condition: Callable[[], bool]) -> bool:
        """Whether it comes about within some seconds."""
        for _ in range(25):
            if condition():
                return True
            await asyncio.sleep(0.2)
        return condition()

    async def _cancel_storm(self) -> bool:
        clients = self._world.clients
        live = clients.live()
        leaving = [a for a in live if self._random.random() < 0.5]
        for answer in leaving:
            answer.gateway.process.run(clients.leave, answer)
        return len(leaving) >= 2


def _request_id(flat: list[bytes]) -> bytes:
    """Of the request that an entry of a stream is about."""
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    if b"notice" in fields:
        return queue_pb2.Notice.FromString(fields[b"notice"]).request_id
    entry = queue_pb2.QueueEntry.FromString(fields[b"entry"])
    return entry.request.request_id or entry.cancel.request_id
