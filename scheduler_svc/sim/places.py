"""Where simulated processes live: names, whose processes come one after the other.

What dies is started anew after a while, as by a supervisor: a worker as another incarnation with an
empty memory, a scheduler as a standby, a gateway with another id, that nothing was sent to.
"""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from gateway.core.types import ModelInfo
from gateway.engine import EngineConfig
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.sim.clients import MODEL
from scheduler_svc.sim.device import EOS, VOCAB_SIZE, DeviceSpec, SimRunner
from scheduler_svc.sim.gateway import SimGateway
from scheduler_svc.sim.loop import Process
from scheduler_svc.sim.redis_clients import RedisClient
from scheduler_svc.sim.scheduler import SimScheduler
from scheduler_svc.sim.worker import SimWorker

if TYPE_CHECKING:
    from scheduler_svc.sim.world import World

RESTART_S = 0.3


class _Place:
    """Where processes of one name live, one after the other."""

    def __init__(self, world: "World", name: str) -> None:
        self.name = name
        self.alive = False
        self._world = world

    def _die(self, process: Process, after_s: float, start: Callable[[], None]) -> None:
        self.alive = False
        process.kill()
        self._world.network.died(self.name)
        self._world.network.client_died(self.name)
        self._world.journal.note(self.name, "has died")
        self._world.later(after_s, start)


class WorkerPlace(_Place):
    """A worker's name and device sizes; its memory is new in each life."""

    def __init__(self, world: "World", name: str, spec: DeviceSpec) -> None:
        super().__init__(world, name)
        self._spec = spec
        self.num_steps = 0
        self.runners: list[SimRunner] = []
        self.start()

    def start(self) -> None:
        """A new incarnation."""
        world = self._world
        runner = SimRunner(world.loop, self._spec, world.clients.script_of)
        self.runners.append(runner)
        self.now = SimWorker(
            world.loop,
            world.network,
            name=self.name,
            model=MODEL,
            incarnation=world.random.getrandbits(62) + 1,
            runner=runner,
            redis=RedisClient(world.redis, self.name),
            on_leave=lambda: self.die(RESTART_S),
        )
        self.alive = True
        self.now.start()
        world.journal.note(self.name, "has started")

    def die(self, after_s: float) -> None:
        """And is started anew after so long."""
        if self.alive:
            self.num_steps += self.now.executor.num_steps
            self._die(self.now.process, after_s, self.start)


class SchedulerPlace(_Place):
    """A scheduler's name."""

    def __init__(self, world: "World", name: str, config: SchedulerSettings) -> None:
        super().__init__(world, name)
        self._config = config
        self.start()

    def start(self) -> None:
        """A new process, which stands by."""
        world = self._world
        self.now = SimScheduler(
            world.loop,
            world.network,
            name=self.name,
            settings=self._config,
            redis=RedisClient(world.redis, self.name),
            journal=world.journal,
            on_exit=lambda code: self.die(RESTART_S),
            suspects=world.suspects,
        )
        self.alive = True
        self.now.start()

    def die(self, after_s: float) -> None:
        """And is started anew after so long."""
        if self.alive:
            self._die(self.now.process, after_s, self.start)


class GatewayPlace(_Place):
    """A gateway's name."""

    def __init__(self, world: "World", name: str, config: EngineConfig) -> None:
        super().__init__(world, name)
        self._config = config
        self._num_lives = 0
        self.start()

    def start(self) -> None:
        """A new process, which knows of no request."""
        world = self._world
        self._num_lives += 1
        self.now = SimGateway(
            world.loop,
            world.network,
            name=self.name,
            model=ModelInfo(
                name=MODEL,
                digest="d" * 64,
                vocab_size=VOCAB_SIZE,
                max_model_len=512,
                eos_token_ids=(EOS,),
            ),
            config=self._config,
            redis=RedisClient(world.redis, self.name),
            random=Random(f"{world.seed}:{self.name}:{self._num_lives}"),
            on_exit=self._exits,
        )
        self.alive = True
        self.now.start()

    def _exits(self) -> None:
        self._world.clients.check_drained(self.now)
        self.die(RESTART_S)

    def die(self, after_s: float) -> None:
        """And is started anew after so long. Its connections are lost."""
        if self.alive:
            now = self.now
            self._die(now.process, after_s, self.start)
            now.gone.set_result(None)
            self._world.clients.disconnected(now)
            self._world.gateways_have_gone = True
