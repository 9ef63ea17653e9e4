"""The two streams of a worker: Session for the scheduler, Tokens for gateways.

A stream is a reader and a writer under one task group; whichever fails ends the other, and what it
raised becomes the status. Nothing is queued here: writers pull from Sessions and TokenHub, so that
a peer that does not read holds up only its own stream.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from quire.v1 import worker_pb2, worker_pb2_grpc

from gpu_worker import codec
from gpu_worker.messages import Acknowledge, CancelRow, Open, StepPlan, Subscribe
from gpu_worker.ports import RunnerInfo
from gpu_worker.session import (
    SCHEMA_REVISION,
    EpochRefusedError,
    Link,
    ProtocolError,
    SessionEndedError,
    Sessions,
    TooManyPlansError,
)
from gpu_worker.slot_table import ID_BYTES
from gpu_worker.token_hub import AllSentError, HubFullError, StreamEndedError, TokenHub, TokenStream

FIRST_MESSAGE_S = 5.0
_MAX_GATEWAY_ID_BYTES = 128


class BadRequestError(Exception):
    """The peer sent what can't be meant."""


class WrongIncarnationError(Exception):
    """The gateway looks for an earlier or later process of this worker."""


class _SilentPeerError(Exception):
    """No first message came."""


_STATUS: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (TooManyPlansError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ProtocolError, grpc.StatusCode.FAILED_PRECONDITION),
    (SessionEndedError, grpc.StatusCode.ABORTED),
    (StreamEndedError, grpc.StatusCode.ABORTED),
    (HubFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (WrongIncarnationError, grpc.StatusCode.FAILED_PRECONDITION),
    (BadRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (codec.UnknownMessageError, grpc.StatusCode.INVALID_ARGUMENT),
    (_SilentPeerError, grpc.StatusCode.DEADLINE_EXCEEDED),
)
_EXPECTED = tuple(kind for kind, _ in _STATUS)


@dataclass(slots=True, kw_only=True)
class Identity:
    """Who this process is. worker_id is set once the port is known, before anyone can ask."""

    worker_id: str = ""
    incarnation: int
    info: RunnerInfo


async def _first(messages: AsyncIterator[Any]) -> Any:
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            return await anext(messages)
    except (TimeoutError, StopAsyncIteration):
        raise _SilentPeerError("no first message") from None


async def _duplex(
    read: Coroutine[Any, Any, None], write: Coroutine[Any, Any, None]
) -> Exception | None:
    """Runs both until reading ends or one fails; returns the expected failure, raises others."""
    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(write)
            await read
            writer.cancel()
    except* _EXPECTED as failures:
        failure = next(iter(_leaves(failures)))
    return failure


def _leaves(group: BaseExceptionGroup[Exception]) -> list[Exception]:
    found: list[Exception] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found


async def _abort(context: Any, failure: Exception) -> None:
    code = next(status for kind, status in _STATUS if isinstance(failure, kind))
    await context.abort(code, str(failure) or type(failure).__name__)


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Session."""

    def __init__(self, sessions: Sessions, identity: Identity) -> None:
        self._sessions = sessions
        self._identity = identity

    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: Any
    ) -> None:
        """See worker.proto. Writes through the context, which is allowed beside a reader."""
        failure: Exception | None = None
        try:
            opening = codec.session_request(await _first(request_iterator))
            if not isinstance(opening, Open):
                raise ProtocolError("a session begins with Open")
            link = self._sessions.open(opening)
        except EpochRefusedError as refusal:
            await context.write(codec.refused(refusal.highest_epoch))
            return
        except _EXPECTED as error:
            await _abort(context, error)
            return
        try:
            await self._greet(context)
            failure = await _duplex(self._read(link, request_iterator), self._write(link, context))
        finally:
            self._sessions.close(link)
        if failure is not None:
            await _abort(context, failure)

    async def _greet(self, context: Any) -> None:
        hello = codec.hello(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            schema_revision=SCHEMA_REVISION,
            info=self._identity.info,
            last_applied_step=self._sessions.last_applied_step,
            first_result_step=self._sessions.first_result_step,
        )
        await context.write(hello)
        for chunk in self._sessions.snapshot_chunks():
            await context.write(codec.session_response(chunk))

    async def _read(self, link: Link, messages: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        async for message in messages:
            plan = codec.session_request(message)
            if not isinstance(plan, StepPlan):
                raise ProtocolError("a session opens once")
            self._sessions.receive(link, plan)

    async def _write(self, link: Link, context: Any) -> None:
        while True:
            await link.wake.wait()
            link.wake.clear()
            for message in self._sessions.next_messages(link):
                await context.write(codec.session_response(message))


class TokensService(worker_pb2_grpc.TokensServiceServicer):
    """Tokens."""

    def __init__(
        self, hub: TokenHub, identity: Identity, on_cancel: Callable[[bytes], None]
    ) -> None:
        self._hub = hub
        self._identity = identity
        self._on_cancel = on_cancel

    async def Tokens(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.TokensRequest], context: Any
    ) -> None:
        """See worker.proto."""
        try:
            subscribe = codec.tokens_request(await _first(request_iterator))
            stream = self._hub.subscribe(self._checked(subscribe))
        except _EXPECTED as error:
            await _abort(context, error)
            return
        failure: Exception | None = None
        try:
            incarnation = self._identity.incarnation
            await context.write(codec.subscribed(incarnation=incarnation, gap=stream.gap))
            failure = await _duplex(
                self._read(stream, request_iterator), self._write(stream, context)
            )
        finally:
            self._hub.unsubscribe(stream)
        if failure is not None and not isinstance(failure, AllSentError):
            await _abort(context, failure)

    def _checked(self, message: object) -> Subscribe:
        if not isinstance(message, Subscribe):
            raise BadRequestError("a Tokens stream begins with Subscribe")
        if len(message.reply_to) != ID_BYTES:
            raise BadRequestError("reply_to must have 16 bytes")
        if not 0 < len(message.gateway_id.encode()) <= _MAX_GATEWAY_ID_BYTES:
            raise BadRequestError(f"gateway_id must have 1 to {_MAX_GATEWAY_ID_BYTES} bytes")
        if message.incarnation != self._identity.incarnation:
            raise WrongIncarnationError("this is another incarnation of the worker")
        return message

    async def _read(
        self, stream: TokenStream, messages: AsyncIterator[worker_pb2.TokensRequest]
    ) -> None:
        async for message in messages:
            match codec.tokens_request(message):
                case Acknowledge(sequence=sequence):
                    stream.acknowledge(sequence)
                case CancelRow(request_id=request_id):
                    if len(request_id) != ID_BYTES:
                        raise BadRequestError("request_id must have 16 bytes")
                    self._on_cancel(request_id)
                case Subscribe():
                    raise BadRequestError("a stream subscribes once")

    async def _write(self, stream: TokenStream, context: Any) -> None:
        while True:
            await stream.wake.wait()
            stream.wake.clear()
            while batches := stream.next_batches():
                for sequence, batch in batches:
                    await context.write(codec.token_batch(sequence, batch))


def register(
    server: grpc.aio.Server,
    sessions: Sessions,
    hub: TokenHub,
    identity: Identity,
    on_cancel: Callable[[bytes], None],
) -> None:
    """Adds both services to a server."""
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(sessions, identity), server)
    worker_pb2_grpc.add_TokensServiceServicer_to_server(
        TokensService(hub, identity, on_cancel), server
    )


SERVICE_NAMES = ("quire.v1.WorkerService", "quire.v1.TokensService")
