"""A worker's token side and a scheduler, as the gateway meets them: real gRPC, real Redis.

FakeScheduler reads the request stream and hands what it reads to a FakeWorker or to the test.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from quire.v1 import common_pb2, queue_pb2, worker_pb2, worker_pb2_grpc
from redis.asyncio import Redis

from servicekit import redis_client, redis_keys
from servicekit.grpc_server import Server

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A request's part of a batch, with logprobs where num_top is given."""

    request_id: bytes
    text: str = ""
    at: int = 0
    attempt: int = 1
    finish: int = 0
    cached: int = 0
    num_top: int | None = None
    prompt_rows: int = 0

    def logprobs(self, entry: int) -> worker_pb2.TokenLogprobs:
        """-0.5 for each token; beside it the token itself and those after it, one less each."""
        ids = [65] * self.prompt_rows + [ord(c) for c in self.text]
        tops = range(self.num_top or 0)
        return worker_pb2.TokenLogprobs(
            entry=entry,
            num_prompt_rows=self.prompt_rows,
            logprobs=[-0.5] * len(ids),
            num_top=len(tops),
            top_token_ids=[i + k for i in ids for k in tops],
            top_logprobs=[-0.5 - k for _ in ids for k in tops],
        )


@dataclass
class FakeWorker:
    """TokensService with one outbox per reply_to, and a registry record."""

    redis: Redis
    model: str
    digest: str
    worker_id: str = "worker"
    incarnation: int = 1
    announcing: bool = True
    outboxes: dict[bytes, list[worker_pb2.TokenBatch]] = field(default_factory=dict)
    subscribes: list[worker_pb2.Subscribe] = field(default_factory=list)
    cancels: list[bytes] = field(default_factory=list)
    acknowledged: int = 0
    gap: bool = False
    address: str = ""
    refusing: bool = False
    num_streams: int = 0
    _num_breaks: int = 0
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def Tokens(self, requests: AsyncIterator[worker_pb2.TokensRequest], context: Any) -> None:
        """Replays what lies behind last_sequence, then follows until the streams are broken."""
        subscribe = (await anext(requests)).subscribe
        if self.refusing:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "refusing")
        self.subscribes.append(subscribe)
        reader = asyncio.get_running_loop().create_task(self._read(requests))
        outbox = self.outboxes.setdefault(subscribe.reply_to, [])
        num_breaks, sent = self._num_breaks, subscribe.last_sequence
        self.num_streams += 1
        try:
            subscribed = worker_pb2.Subscribed(incarnation=self.incarnation, gap=self.gap)
            await context.write(worker_pb2.TokensResponse(subscribed=subscribed))
            self.gap = False
            while True:
                async with self._news:
                    if sent == len(outbox) and num_breaks == self._num_breaks:
                        await self._news.wait()
                if num_breaks != self._num_breaks:
                    break
                for batch in outbox[sent:]:
                    await context.write(worker_pb2.TokensResponse(batch=batch))
                    sent = batch.sequence
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
        finally:
            self.num_streams -= 1
            reader.cancel()

    async def _read(self, requests: AsyncIterator[worker_pb2.TokensRequest]) -> None:
        async for request in requests:
            if request.HasField("cancel"):
                self.cancels.append(request.cancel.request_id)
            else:
                self.acknowledged = request.acknowledge.sequence

    async def send(self, reply_to: bytes, *rows: Row) -> None:
        """One step's batch for a gateway."""
        outbox = self.outboxes.setdefault(reply_to, [])
        outbox.append(
            worker_pb2.TokenBatch(
                sequence=len(outbox) + 1,
                request_ids=b"".join(row.request_id for row in rows),
                attempts=[row.attempt for row in rows],
                first_positions=[row.at for row in rows],
                num_tokens=[len(row.text) for row in rows],
                token_ids=[ord(c) for row in rows for c in row.text],
                finish_reasons=[common_pb2.FinishReason.ValueType(row.finish) for row in rows],
                num_cached_tokens=[row.cached for row in rows],
                logprobs=[row.logprobs(i) for i, row in enumerate(rows) if row.num_top is not None],
            )
        )
        await self._wake()

    async def break_streams(self) -> None:
        """Ends every stream, the outboxes stay."""
        self._num_breaks += 1
        await self._wake()

    async def _wake(self) -> None:
        async with self._news:
            self._news.notify_all()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeWorker"]:
        """Listens and keeps its registration."""
        server = Server(
            lambda s: worker_pb2_grpc.add_TokensServiceServicer_to_server(self, s),  # type: ignore[arg-type]
            ["quire.v1.TokensService"],
        )
        self.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        task = asyncio.get_running_loop().create_task(self._announce())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])
            await self.break_streams()
            await server.stop(0)

    async def _announce(self) -> None:
        while True:
            if self.announcing:
                record = queue_pb2.WorkerRecord(
                    worker_id=self.worker_id,
                    incarnation=self.incarnation,
                    address=self.address,
                    model_digest=self.digest,
                    max_model_len=256,
                ).SerializeToString()
                with contextlib.suppress(Exception):
                    await redis_client.announce(
                        self.redis, self.model, "worker", self.worker_id, record
                    )
            await asyncio.sleep(0.3)


@dataclass
class FakeScheduler:
    """Reads the stream; `handle` gets every request, entries end with `finish`."""

    redis: Redis
    model: str
    handle: Callable[[queue_pb2.QueuedRequest], None] = lambda request: None
    requests: list[queue_pb2.QueuedRequest] = field(default_factory=list)
    cancels: list[bytes] = field(default_factory=list)
    entries: dict[bytes, bytes] = field(default_factory=dict)

    async def run(self) -> None:
        """Reads until cancelled."""
        key = redis_keys.requests(self.model)
        made = False
        while True:
            with contextlib.suppress(Exception):
                if not made:
                    await self.redis.xgroup_create(key, redis_keys.GROUP, id="0", mkstream=True)
                    made = True
                read: Any = await self.redis.xreadgroup(
                    redis_keys.GROUP, redis_keys.CONSUMER, {key: ">"}, count=64
                )
                for entry_id, fields in _entries(read):
                    await self._take(entry_id, fields)
            await asyncio.sleep(0.02)

    async def _take(self, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        entry = queue_pb2.QueueEntry.FromString(fields[b"entry"])
        assert int(fields[b"deadline_ms"]) >= 0
        if entry.HasField("cancel"):
            await self._delete(entry_id)
            await self.finish(entry.cancel.request_id)
            # Last: who sees it finds the queue without either entry.
            self.cancels.append(entry.cancel.request_id)
            return
        self.entries[entry.request.request_id] = entry_id
        self.requests.append(entry.request)
        self.handle(entry.request)

    async def finish(self, request_id: bytes, notice: queue_pb2.Notice | None = None) -> None:
        """Acknowledges and deletes; tells the gateway where there is something to tell."""
        if request_id not in self.entries:
            return
        await self._delete(self.entries.pop(request_id))
        if notice is not None:
            [gateway_id] = {r.gateway_id for r in self.requests if r.request_id == request_id}
            key = redis_keys.notices(self.model, gateway_id)
            await self.redis.xadd(key, {"notice": notice.SerializeToString()})

    async def _delete(self, entry_id: bytes) -> None:
        key = redis_keys.requests(self.model)
        await self.redis.xack(key, redis_keys.GROUP, entry_id)
        await self.redis.xdel(key, entry_id)


def _entries(read: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    if not read:
        return []
    streams = list(read.values()) if isinstance(read, dict) else [pair[1] for pair in read]
    found: list[tuple[bytes, dict[bytes, bytes]]] = []
    for stream in streams:
        found += stream[0] if stream and isinstance(stream[0], list) else stream
    return found
