"""One Tokens stream per live worker incarnation, resumed where it broke.

The registry, read twice a second, only adds: a worker that left it is dialled on while its stream
lives, and given up when the stream has been broken for GIVE_UP_S or another incarnation has
taken the name. While Redis is away nothing changes.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable

import grpc.aio
from quire.v1 import worker_pb2, worker_pb2_grpc
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway import codec
from gateway.core.types import RequestId, WorkerRecord
from gateway.ports import EventSink
from servicekit import grpc_server, logs, redis_client

WATCH_S = 0.5
GIVE_UP_S = 10.0
ACK_BATCHES = 64
ACK_S = 0.1
MAX_PENDING_CANCELS = 16_384
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 1.0
SUBSCRIBED_TIMEOUT_S = 5.0
Dial = Callable[[str], grpc.aio.Channel]
_Call = grpc.aio.StreamStreamCall[worker_pb2.TokensRequest, worker_pb2.TokensResponse]


def _never() -> bool:
    return False


class TokensLink:
    """WorkerLink. `run` keeps the stream up until the worker is given up."""

    def __init__(
        self,
        record: WorkerRecord,
        gateway_id: str,
        reply_to: bytes,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        dial: Dial = grpc_server.channel,
        saturated: Callable[[], bool] = _never,
    ) -> None:
        self.record = record
        self.registered = True
        self.replaced = False
        self.connected = False
        self._was_connected = False
        self._told_all = False
        self._gateway_id = gateway_id
        self._reply_to = reply_to
        self._last_sequence = 0
        self._acknowledged = 0
        self._clock_s = clock_s
        self._dial = dial
        self._saturated = saturated
        self._broken_since_s = clock_s()
        # At the bound the oldest is dropped; the tokens that then come bring it back.
        self._cancels: deque[RequestId] = deque(maxlen=MAX_PENDING_CANCELS)
        self._to_send = asyncio.Event()
        self._log = logs.get_logger("gateway.tokens").bind(
            worker=record.worker_id, incarnation=record.incarnation
        )

    def cancel(self, request_id: RequestId) -> None:
        """Ends a request's row, in the background."""
        self._cancels.append(request_id)
        self._to_send.set()

    @property
    def given_up(self) -> bool:
        """Nothing more is to be had from this incarnation."""
        if self.connected:
            return False
        if self.replaced:
            return True
        return not self.registered and self._clock_s() - self._broken_since_s > GIVE_UP_S

    async def run(self, sink: EventSink) -> None:
        """Dials until given up."""
        backoff_s = FIRST_BACKOFF_S
        async with self._dial(self.record.address) as channel:
            stub = worker_pb2_grpc.TokensServiceStub(channel)
            while not self.given_up:
                try:
                    # The stubs describe the synchronous API.
                    await self._follow(stub.Tokens(), sink)  # type: ignore[call-arg, arg-type]
                except grpc.aio.AioRpcError as error:
                    self._log.debug("stream_error", code=error.code().name)
                except (codec.DecodeError, TimeoutError, asyncio.InvalidStateError) as error:
                    self._log.warning("stream_error", error=type(error).__name__)
                if self.connected:
                    self.connected = False
                    self._broken_since_s = self._clock_s()
                    backoff_s = FIRST_BACKOFF_S
                    self._log.info("stream_down", last_sequence=self._last_sequence)
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, LAST_BACKOFF_S)
        self._log.info("given_up", replaced=self.replaced)
        if self._was_connected and not self._told_all:
            # Its outbox is gone, and with it what it had sent into it and the scheduler has booked.
            sink.on_gap(self)

    async def _follow(self, call: _Call, sink: EventSink) -> None:
        """One stream from Subscribe to its break."""
        try:
            async with asyncio.timeout(SUBSCRIBED_TIMEOUT_S):
                await call.write(
                    codec.subscribe(
                        self._gateway_id,
                        self._reply_to,
                        self.record.incarnation,
                        self._last_sequence,
                    )
                )
                first = await _next(call)
            gap = None if first is None else codec.subscribed_gap(first)
            if gap is None:
                return
            self.connected = self._was_connected = True
            self._told_all = False
            self._log.info("stream_up", last_sequence=self._last_sequence, gap=gap)
            if gap:
                sink.on_gap(self)
            sender = asyncio.get_running_loop().create_task(self._send(call))
            try:
                await self._read(call, sink, expect_gap=gap)
                # A worker ends a stream in order only when it leaves and has sent all it had.
                self._told_all = True
            finally:
                sender.cancel()
                with contextlib.suppress(
                    asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError
                ):
                    await sender
        finally:
            call.cancel()

    async def _read(self, call: _Call, sink: EventSink, *, expect_gap: bool) -> None:
        while True:
            message = await _next(call)
            if message is None:
                return
            batch = codec.decode_batch(message)
            if batch is None or batch.sequence <= self._last_sequence:
                continue
            lost = batch.sequence != self._last_sequence + 1 and self._last_sequence > 0
            self._last_sequence = batch.sequence
            if lost and not expect_gap:
                self._log.warning("batches_lost", sequence=batch.sequence)
                sink.on_gap(self)
            expect_gap = False
            sink.on_batch(batch, self, hold=self._saturated())
            if batch.sequence - self._acknowledged >= ACK_BATCHES:
                self._to_send.set()

    async def _send(self, call: _Call) -> None:
        """Cancels at once, acknowledgements in between."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ACK_S):
                    await self._to_send.wait()
            self._to_send.clear()
            while self._cancels:
                await call.write(codec.cancel_row(self._cancels.popleft()))
            if self._acknowledged != self._last_sequence:
                self._acknowledged = self._last_sequence
                await call.write(codec.acknowledge(self._acknowledged))


async def _next(call: _Call) -> worker_pb2.TokensResponse | None:
    """The next message, None at the stream's end."""
    message = await call.read()
    return message if isinstance(message, worker_pb2.TokensResponse) else None


class TokensFleet:
    """Fleet over the workers' registry."""

    def __init__(
        self,
        *,
        redis: Redis,
        model: str,
        digest: str,
        gateway_id: str,
        reply_to: bytes,
        clock_s: Callable[[], float] = time.monotonic,
        dial: Dial = grpc_server.channel,
        saturated: Callable[[], bool] = _never,
    ) -> None:
        self._redis = redis
        self._model = model
        self._digest = digest
        self._gateway_id = gateway_id
        self._reply_to = reply_to
        self._clock_s = clock_s
        self._dial = dial
        self._saturated = saturated
        self._links: dict[tuple[str, int], TokensLink] = {}
        # Told once each; forgotten when the worker has left the registry.
        self._foreign: set[tuple[str, int]] = set()
        self._log = logs.get_logger("gateway.fleet")

    @property
    def usable(self) -> bool:
        """At least one worker has its stream open and is in the registry."""
        return any(link.connected and link.registered for link in self._links.values())

    @property
    def max_model_len(self) -> int | None:
        """The longest context a worker offers; None while none is known."""
        lengths = [x.record.max_model_len for x in self._links.values() if x.record.max_model_len]
        return max(lengths, default=None)

    def cancel(self, request_id: RequestId) -> None:
        """Tells every worker: those that do not know the request ignore it."""
        for link in self._links.values():
            if link.connected:
                link.cancel(request_id)

    async def run(self, sink: EventSink) -> None:
        """Follows the registry, until cancelled."""
        async with asyncio.TaskGroup() as group:

            def start(link: TokensLink) -> None:
                group.create_task(self._keep(link.run(sink), link))

            while True:
                await self._watch(start)
                await asyncio.sleep(WATCH_S)

    async def _keep(self, running: Awaitable[None], link: TokensLink) -> None:
        key = (link.record.worker_id, link.record.incarnation)
        try:
            await running
        finally:
            link.connected = False
            if self._links.get(key) is link:
                del self._links[key]

    async def _watch(self, start: Callable[[TokensLink], None]) -> None:
        try:
            found = await redis_client.members(self._redis, self._model, "worker")
        except (RedisError, OSError, TimeoutError):
            return
        records: dict[tuple[str, int], WorkerRecord] = {}
        for worker_id, data in found.items():
            try:
                record = codec.decode_worker(data)
            except codec.DecodeError:
                self._log.error("bad_worker_record", worker=worker_id)
                continue
            records[record.worker_id, record.incarnation] = record
        self._foreign &= records.keys()
        names = {worker_id for worker_id, _ in records}
        for key, link in self._links.items():
            link.registered = key in records
            link.replaced = not link.registered and key[0] in names
        for key, record in records.items():
            if record.model_digest != self._digest:
                self._refuse(key, record)
            elif key not in self._links:
                link = TokensLink(
                    record,
                    self._gateway_id,
                    self._reply_to,
                    clock_s=self._clock_s,
                    dial=self._dial,
                    saturated=self._saturated,
                )
                self._links[key] = link
                start(link)

    def _refuse(self, key: tuple[str, int], record: WorkerRecord) -> None:
        if key not in self._foreign:
            self._foreign.add(key)
            self._log.error(
                "worker_not_used",
                why="its model digest differs from this gateway's",
                worker=record.worker_id,
                worker_digest=record.model_digest[:16],
                own_digest=self._digest[:16],
            )
