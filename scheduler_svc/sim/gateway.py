"""A simulated gateway process.

Shipped: the engine with everything below it (stream assembly, superseding, sweeping, drains), the
token streams' client side, and the queue. Modelled: the tokenizer, a token being one character;
what is above the engine: clients call it as REST handlers do; and the order in which gateway.app
begins and ends.
"""

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from redis.exceptions import RedisError

from gateway.adapters.queue_redis import RedisQueue
from gateway.adapters.tokens_grpc import TokensFleet
from gateway.core.prompt import Message
from gateway.core.requests import RawRequest
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
DRAIN_S, LAST_WORDS_S = 3.0, 0.5


class GoneError(Exception):
    """The process to which a client is connected has ended."""


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
    """One process's life. `on_exit` is called when it has drained."""

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
        on_exit: Callable[[], None],
    ) -> None:
        self.process = Process(loop, name)
        self.name = name
        self.drained = False
        # Done when the process has ended.
        self.gone: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._on_exit = on_exit
        self._stop = asyncio.Event()
        client: Any = redis
        gateway_id, reply_to = f"{name}-{random.randbytes(4).hex()}", random.randbytes(16)
        self._queue = RedisQueue(
            redis=client,
            blocking=client,
            model=model.name,
            gateway_id=gateway_id,
            reply_to=reply_to,
            max_requests=10_000,
            max_tokens=10_000_000,
        )
        self._fleet = TokensFleet(
            redis=client,
            model=model.name,
            digest=model.digest,
            gateway_id=gateway_id,
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

    def drain(self) -> None:
        """Ends in order, as at SIGTERM."""
        self.process.run(self._stop.set)

    async def submit(self, raw: RawRequest) -> list[LiveRequest]:
        """As a connection to it brings a request. Raises GatewayError, or GoneError."""
        answer = self.process.start(self.engine.submit_all([raw]))
        both: list[asyncio.Future[Any]] = [answer, self.gone]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if self.gone.done():
            if answer.done() and not answer.cancelled():
                answer.exception()  # nobody else will ask for it
            raise GoneError(self.name)
        return answer.result()

    async def _guarded(self, work: Callable[[], Any]) -> None:
        try:
            await work()
        except Exception as error:
            self._loop.fail(error)

    async def _main(self) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._fleet.run(self.engine)),
                group.create_task(self.engine.run()),
            ]
            await self._wait_for_redis()
            if not self._stop.is_set():
                tasks.append(group.create_task(self._queue.run(self.engine.on_notice)))
            await self._stop.wait()
            await self.engine.drain(DRAIN_S)
            await self._queue.flush(LAST_WORDS_S)
            # For the last frames.
            await asyncio.sleep(LAST_WORDS_S)
            for task in tasks:
                task.cancel()
        await self._queue.close()
        self.drained = True
        self._on_exit()

    async def _wait_for_redis(self) -> None:
        while not self._stop.is_set():
            try:
                await self._queue.start()
                return
            except RedisError:
                await asyncio.sleep(START_RETRY_S)
