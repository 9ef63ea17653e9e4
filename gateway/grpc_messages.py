"""gRPC requests whose bytes are no message, such as text that is not UTF-8.

The library would answer UNKNOWN with the exception's own words; here every method answers
INVALID_ARGUMENT in ours.
"""

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

MESSAGE = "The request is not a valid message."
_BROKEN = object()
_Context = grpc.aio.ServicerContext[Any, Any]
_Handler = Callable[[Any, _Context], Any]


class CheckedMessages(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Stands before every method."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, with requests that are looked at first."""
        found = await continuation(details)
        if found is None or found.request_deserializer is None:
            return found
        changes: dict[str, Any] = {"request_deserializer": _tolerant(found.request_deserializer)}
        if found.unary_unary is not None:
            changes["unary_unary"] = _unary_unary(found.unary_unary)
        elif found.unary_stream is not None:
            changes["unary_stream"] = _to_stream(found.unary_stream, _checked)
        elif found.stream_stream is not None:
            changes["stream_stream"] = _to_stream(found.stream_stream, _checked_each)
        return found._replace(**changes)


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _BROKEN

    return read


def _unary_unary(inner: _Handler) -> _Handler:
    async def handle(request: Any, context: _Context) -> Any:
        return await inner(await _checked(request, context), context)

    return handle


def _to_stream(inner: _Handler, check: Callable[[Any, _Context], Awaitable[Any]]) -> _Handler:
    async def handle(request: Any, context: _Context) -> None:
        request = await check(request, context)
        if not inspect.isasyncgenfunction(inner):
            await inner(request, context)
            return
        async with contextlib.aclosing(inner(request, context)) as answers:
            async for answer in answers:
                await context.write(answer)

    return handle


async def _checked(request: Any, context: _Context) -> Any:
    if request is _BROKEN:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, MESSAGE)
    return request


async def _checked_each(requests: Any, context: _Context) -> AsyncIterator[Any]:
    async def each() -> AsyncIterator[Any]:
        async for request in requests:
            yield await _checked(request, context)

    return each()
