"""A simulated gateway process.

Shipped: the engine with everything below it (stream assembly, superseding, sweeping), the token
streams' client side, and the queue. Modelled: the tokenizer, a token being one character, and what
is above the engine: clients call it as REST handlers do.
"""

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from redis.exceptions import RedisError

from gateway.adapters.queue_redis import RedisQueue
from gateway.adapters.tokens_grpc import TokensFleet
from gateway.core.prompt import Message
from gateway.core.types import ModelInfo
from gateway.engine import Engine, EngineConfig
from gateway.live import LiveRequest
from gateway.metrics import GatewayMetrics
from gateway.ports import Sources
from scheduler_svc.sim.device import ViolationError
from scheduler_svc.sim.loop import Process, VirtualLoop
from scheduler_svc.sim.network import Network
from scheduler_svc.sim.redis_clients import RedisClient
from servicekit.metrics import new_registry

START_RETRY_S = 0.5


class SimDetokenizer:
    """One character a token."""

    def push(self, token: int) -> str:
        """Its character."""
        return chr(0x4E00 + token % 0x5000)

    def flush(self) -> str:
        """Nothing is left."""
        return ""


class SimTokenizer:
    """gateway.ports.TokenizerPort; prompts come as token ids, so nothing else is asked of it."""

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Codes of characters."""
        return [ord(character) for character in text]

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Sequence[int]:
        """One after the other."""
        return [ord(character) for message in messages for character in message.content]

    async def decode_ids(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """All at once."""
        return "".join(map(SimDetokenizer().push, ids))

    def token_bytes(self, token_id: int) -> bytes:
        """Of its character."""
        return SimDetokenizer().push(token_id).encode()

    def detokenizer(
        self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> SimDetokenizer:
        """For one run of tokens."""
        return SimDetokenizer()


class OnceEngine(Engine):
    """The shipped engine, watched: it may end a request once."""

    def __init__(self, loop: VirtualLoop, **options: Any) -> None:
        super().__init__(**options)
        self._loop = loop
        self._ended: set[bytes] = set()

    def _finished(self, live: LiveRequest, *, tell: bool) -> None:
        if live.request_id in self._ended:
            detail = f"{live.public_id} has ended again: {live.state.end}"
            self._loop.fail(ViolationError("a request ends once", detail))
        self._ended.add(live.request_id)
        super()._finished(live, tell=tell)


class SimGateway:
    """One process, which lives as long as its world."""

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        *,
        name: str,
        model: ModelInfo,
        config: EngineConfig,
        redis: RedisClient,
        random: Random,
    ) -> None:
        self.process = Process(loop, name)
        self.name = name
        self._loop = loop
        client: Any = redis
        reply_to = random.randbytes(16)
        self._queue = RedisQueue(
            redis=client,
            blocking=client,
            model=model.name,
            gateway_id=name,
            reply_to=reply_to,
            max_requests=10_000,
            max_tokens=10_000_000,
        )
        self._fleet = TokensFleet(
            redis=client,
            model=model.name,
            digest=model.digest,
            gateway_id=name,
            reply_to=reply_to,
            clock_s=loop.time,
            dial=network.dial(name),
        )
        self.metrics = GatewayMetrics(new_registry(), model.name)
        self.engine = OnceEngine(
            loop,
            model=model,
            config=config,
            queue=self._queue,
            fleet=self._fleet,
            tokenizer=SimTokenizer(),
            metrics=self.metrics,
            sources=Sources(clock_s=loop.time, random_bytes=random.randbytes),
        )

    def start(self) -> None:
        """Registers and serves."""
        self.process.start(self._guarded(self._main))

    async def _guarded(self, work: Callable[[], Any]) -> None:
        try:
            await work()
        except Exception as error:
            self._loop.fail(error)

    async def _main(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._fleet.run(self.engine))
            group.create_task(self.engine.run())
            while True:
                try:
                    await self._queue.start()
                    break
                except RedisError:
                    await asyncio.sleep(START_RETRY_S)
            group.create_task(self._queue.run(self.engine.on_notice))
