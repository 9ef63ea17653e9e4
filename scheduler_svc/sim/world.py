"""A world: processes, what is between them, their clients, and one seed for all.

`run` lets requests and faults come, heals everything, and requires that each request ends within
HEALED_S and that nothing is left over SETTLED_S later: FORGOTTEN_S where gateways have gone, whose
requests the scheduler gives up after a grace, or Redis has lost its last writes.

Redis loses writes in one world of RARE only: there a request that it has lost has to wait for its
deadline, which is nearer there; and no clock jumps, which would bring deadlines. Gateways die in
another one of RARE, since much time passes until they are given up.
"""

import asyncio
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random

from gateway.engine import EngineConfig
from scheduler_svc import settings
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.sim import clients as asking
from scheduler_svc.sim.device import DeviceSpec, ViolationError
from scheduler_svc.sim.faults import DIES, FORGETS, POISON, Faults
from scheduler_svc.sim.journal import Journal
from scheduler_svc.sim.loop import Process, VirtualLoop
from scheduler_svc.sim.network import Network
from scheduler_svc.sim.places import GatewayPlace, SchedulerPlace, WorkerPlace
from scheduler_svc.sim.redis_model import RedisServer
from servicekit import redis_keys

MIN_REQUESTS = 50
ARRIVALS_S = 3.0
HEALED_S = 120.0
# A step that began on a slow worker goes on as slowly after all is healed.
SETTLED_S = 12.0
FORGOTTEN_S = 30.0
STALL_S = 10.0
RARE = 5
DEADLINE_S, NEAR_DEADLINE_S = 600.0, 90.0
MAX_WORKERS, MAX_GATEWAYS = 3, 3
START_S = 1.2
MAX_NUM_BATCHED_TOKENS = (16, 48, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`only` leaves one kind of fault, "" none at all."""

    only: str | None = None
    num_requests: int = MIN_REQUESTS


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a seed has come to. `rule` is the promise that was broken, "" if none was."""

    seed: int
    num_events: int = 0
    num_callbacks: int = 0
    virtual_s: float = 0.0
    num_requests: int = 0
    num_steps: int = 0
    num_blocks_checked: int = 0
    num_refused: int = 0
    num_scored: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    rule: str = ""
    detail: str = ""


class World:
    """Built by a seed, run once. With a `plot` that happens in the place of faults by chance."""

    def __init__(
        self,
        seed: int,
        options: Options,
        write: Callable[[str], object] | None = None,
        plot: "Callable[[World], Awaitable[None]] | None" = None,
    ) -> None:
        self._plot = plot
        self.seed = seed
        self._options = options
        self.random = Random(f"{seed}:world")
        self._requests = Random(f"{seed}:requests")
        self._num_asked = 0
        # Requests that a scheduler has taken for poison; those of which Redis has lost something.
        self.suspects: set[bytes] = set()
        self.forgotten: set[bytes] = set()
        self.gateways_have_gone = self.healed = False
        by_chance = options.only is None and plot is None
        self.forgetful = options.only == FORGETS or (by_chance and seed % RARE == 0)
        self.gateways_die = options.only == DIES or (by_chance and seed % RARE == 1)
        self.loop = loop = VirtualLoop()
        self.process = Process(loop, "world")
        self.journal = Journal(loop, write)
        self.network = Network(loop, Random(f"{seed}:network"))
        self.redis = RedisServer(loop, Random(f"{seed}:redis"))
        asyncio._set_running_loop(loop)
        try:
            self.gateways: list[GatewayPlace] = []
            self.workers: list[WorkerPlace] = []
            self.clients = asking.Clients(
                loop, self.journal, self.gateways, self.suspects, self.forgotten
            )
            for _ in range(2):
                self.add_gateway()
            for _ in range(self.random.choice((2, 2, 3))):
                self.add_worker()
            config = self._settings()
            self.schedulers = [SchedulerPlace(self, f"scheduler-{i}", config) for i in range(2)]
        finally:
            asyncio._set_running_loop(None)
        self.faults = Faults(self, Random(f"{seed}:faults"))

    @property
    def leader(self) -> SchedulerPlace | None:
        """The scheduler that leads with the highest epoch, if it runs."""
        leading = [s for s in self.schedulers if s.alive and s.now.epoch]
        best = max(leading, key=lambda s: s.now.epoch, default=None)
        return None if best is None or best.now.process.paused else best

    @property
    def highest_epoch(self) -> int:
        """That Redis has given out."""
        return int(self.redis.get(redis_keys.epoch(asking.MODEL)) or b"0")

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Calls it as the world, not as whoever asks."""
        self.loop.call_later(seconds, function, context=self.process.context)

    def add_worker(self) -> WorkerPlace | None:
        """One more, with its own sizes; None at the bound."""
        if len(self.workers) >= MAX_WORKERS:
            return None
        place = WorkerPlace(self, f"worker-{len(self.workers)}", self._spec())
        self.workers.append(place)
        return place

    def add_gateway(self) -> GatewayPlace | None:
        """One more; None at the bound."""
        if len(self.gateways) >= MAX_GATEWAYS:
            return None
        config = EngineConfig(
            default_deadline_s=NEAR_DEADLINE_S if self.forgetful else DEADLINE_S,
            stall_s=STALL_S,
            stream_buffer_tokens=256,
        )
        place = GatewayPlace(self, f"gateway-{len(self.gateways)}", config)
        self.gateways.append(place)
        return place

    def run(self) -> Outcome:
        """The whole of it. Never raises: what is broken stands in the outcome."""
        outcome = Outcome(seed=self.seed)
        try:
            self.loop.run(self._main())
        except ViolationError as error:
            outcome.rule, outcome.detail = error.rule, error.detail
        except (Exception, asyncio.CancelledError) as error:
            outcome.rule = f"nothing raises {type(error).__name__}"
            outcome.detail = "".join(traceback.format_exception(error)[-12:])
        outcome.num_events = self.journal.num_events
        outcome.num_callbacks = self.loop.num_callbacks
        outcome.virtual_s = self.loop.time()
        outcome.num_requests = len(self.clients.answers)
        outcome.num_refused = self.clients.num_refused
        outcome.num_scored = self.clients.num_scored
        outcome.faults = self.faults.effects
        outcome.ends = self.clients.ends
        runners = [runner for worker in self.workers for runner in worker.runners]
        outcome.num_steps = sum(w.num_steps + w.now.executor.num_steps for w in self.workers)
        outcome.num_blocks_checked = sum(runner.num_blocks_checked for runner in runners)
        poisoned = set().union(*(runner.poisoned for runner in runners))
        if poisoned:
            outcome.faults[POISON] += len(poisoned)
        self.loop.wind_up()
        return outcome

    # One after the other

    async def _main(self) -> None:
        num_poison = (
            0 if self._options.only not in (None, POISON) else self.random.choice((0, 0, 1, 2))
        )
        await asyncio.sleep(START_S)
        self._ask(self._options.num_requests, ARRIVALS_S, num_poison)
        if self._plot is not None:
            await self._plot(self)
        elif self._options.only != "":
            await self.faults.run(START_S + ARRIVALS_S, self._options.only)
        else:
            await asyncio.sleep(ARRIVALS_S)
        self._heal()
        await self._until(lambda: not self.clients.num_open, lambda: HEALED_S, self._who_is_open)
        await self._until(lambda: not self._left_over(), self._settled_s, self._left_over)
        self.clients.check_ends()

    def ask_more(self, of: GatewayPlace | None = None) -> None:
        """For faults that want somebody to meet; of one gateway, or of those of the begin."""
        if of is None:
            self._ask(10, 1.0, 0)
        else:
            self._ask(3, 0.5, 0, self.gateways.index(of))

    def ask_at_once(self, num_requests: int, num_poison: int) -> None:
        """So many within a moment, of which some do harm to what computes them."""
        self._ask(num_requests, 0.02, num_poison)

    def _ask(
        self, num_requests: int, over_s: float, num_poison: int, gateway: int | None = None
    ) -> None:
        first = self._num_asked
        asked = asking.draw(self._requests, num_requests, over_s, num_poison, first)
        self._num_asked += len(asked)
        for call in asked:
            call.gateway = call.gateway if gateway is None else gateway
        self.clients.start(asked)

    def _heal(self) -> None:
        self.journal.note("world", "heals")
        self.healed = True
        self.redis.trouble.heal()
        self.network.heal_all()
        for worker in self.workers:
            worker.now.process.resume(whoever_paused=True)
            worker.now.runner.slowed.clear()
        for scheduler in self.schedulers:
            scheduler.now.process.resume(whoever_paused=True)

    def _settled_s(self) -> float:
        """Looked at again and again: a gateway that drains goes when nobody waits for it."""
        return FORGOTTEN_S if self.gateways_have_gone or self.forgotten else SETTLED_S

    async def _until(
        self,
        condition: Callable[[], bool],
        within_s: Callable[[], float],
        what: Callable[[], str],
    ) -> None:
        began_s = self.loop.time()
        while not condition():
            if self.loop.time() > began_s + within_s():
                raise ViolationError("everything ends after all is healed", what())
            await asyncio.sleep(0.1)

    def _who_is_open(self) -> str:
        live = [f"{a.name} ({len(a.given)}/{len(a.script.outputs)})" for a in self.clients.live()]
        return f"{self.clients.num_open} requests are open after {HEALED_S} s: {live[:6]}"

    def _left_over(self) -> str:
        """What should be gone; empty if nothing is."""
        requests = redis_keys.requests(asking.MODEL)
        left = {
            "queue entries": self.redis.num_entries(requests),
            "pending entries": self.redis.num_pending(requests),
            "streams": sum(g.now.engine.num_live for g in self.gateways if g.alive),
            "rows": sum(w.now.num_live_rows for w in self.workers if w.alive),
        }
        leader = self.leader
        view = leader.now.view if leader else None
        if view is None:
            left["missing leaders"] = 1
        else:
            left["waiting"], left["running"] = view.num_waiting, view.num_running
            left["swapped"] = view.num_swapped
            left["missing workers"] = len(self.workers) - len(view.workers)
            left["blocks"] = sum(w.num_blocks_used + w.num_host_blocks_used for w in view.workers)
        return ", ".join(f"{count} {name}" for name, count in left.items() if count)

    # How it is built

    def _spec(self) -> DeviceSpec:
        random = self.random
        block_size = random.choice((4, 4, 8, 16))
        # Room for the longest request, and for about three of them.
        least = -(-88 // block_size)
        return DeviceSpec(
            num_slots=random.choice((3, 6, 12)),
            num_blocks=least + random.randrange(2 * least),
            num_host_blocks=random.choice((0, 2 * least, 6 * least)),
            block_size=block_size,
            max_num_batched_tokens=random.choice(MAX_NUM_BATCHED_TOKENS),
            swap_bytes_per_s=random.choice((2e5, 2e6, 2e7)),
        )

    def _settings(self) -> SchedulerSettings:
        random = self.random
        chosen = (
            ("scheduling_policy", random.choice(("fcfs", "fcfs", "fair"))),
            ("preemption_mode", random.choice(("auto", "swap", "recompute"))),
            ("max_inflight_steps", random.choice(("auto", "1", "2", "4", "8"))),
            ("prefill_chunk_tokens", random.choice(("0", "0", "7"))),
            ("enable_prefix_caching", random.choice(("true", "true", "true", "false"))),
        )
        return _settings_of(chosen)


@cache
def _settings_of(chosen: tuple[tuple[str, str], ...]) -> SchedulerSettings:
    environ = {f"QUIRE_{name.upper()}": value for name, value in chosen}
    return settings.load([], {"QUIRE_SERVED_MODEL_NAME": asking.MODEL, **environ})


def run_seed(
    seed: int, options: Options | None = None, write: Callable[[str], object] | None = None
) -> Outcome:
    """Builds a world and runs it."""
    return World(seed, options or Options(), write).run()
