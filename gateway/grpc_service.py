"""The public gRPC interface over the same engine."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from quire.v1 import inference_pb2, inference_pb2_grpc

from gateway import codec
from gateway.chunks import Chunks
from gateway.core.errors import (
    DeadlineError,
    GatewayError,
    QueueFullError,
    RejectReason,
    RequestCancelledError,
    RequestRejected,
    UnavailableError,
    error_of,
)
from gateway.engine import Engine
from gateway.live import LiveRequest, usage_of
from servicekit import logs

SERVICE_NAME = "quire.v1.InferenceService"
_STATUS: tuple[tuple[type[GatewayError], grpc.StatusCode], ...] = (
    (QueueFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (RequestCancelledError, grpc.StatusCode.CANCELLED),
)
# Of a prompt in one message: with 20 logprobs each they stay far below what clients take.
ECHO_TOKENS = 512
_Context = grpc.aio.ServicerContext[Any, Any]
# The tenant of a call, "" where there are no keys.
Callers = Callable[[_Context], str]


def nobody(_: _Context) -> str:
    """Callers have no names."""
    return ""


def _traceparent(context: _Context) -> str:
    for name, value in context.invocation_metadata() or ():
        if name == "traceparent":
            return value if isinstance(value, str) else ""
    return ""


def status_of(error: GatewayError) -> grpc.StatusCode:
    """gRPC status."""
    if isinstance(error, RequestRejected):
        if error.reason is RejectReason.MODEL_NOT_FOUND:
            return grpc.StatusCode.NOT_FOUND
        return grpc.StatusCode.INVALID_ARGUMENT
    return next((s for kind, s in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Errors before acceptance are statuses; afterwards Finished says how it ended."""

    def __init__(self, engine: Engine, callers: Callers = nobody) -> None:
        self._engine = engine
        self._callers = callers
        self._log = logs.get_logger("gateway.grpc")

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Streams the answer to one prompt, all its samples."""
        try:
            codec.check_generate(request)
            raw = codec.decode_generate(
                request, tenant=self._callers(context), traceparent=_traceparent(context)
            )
            lives = await self._engine.submit_all([raw])
        except GatewayError as error:
            await self._abort(context, error)
        try:
            yield codec.started(lives[0].public_id, request.client_request_id)
            async with (
                Chunks(self._engine, lives) as chunks,
                contextlib.aclosing(self._events(lives, chunks)) as events,
            ):
                async for event in events:
                    yield event
        finally:
            for live in lives:
                self._engine.cancel(live)

    async def _events(
        self, lives: Sequence[LiveRequest], chunks: Chunks
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """All but the first one. The first sample that fails ends them."""
        echoed = lives[0].echo_text is None
        error: GatewayError | None = None
        while chunks.num_left and error is None:
            index, chunk = await chunks.next()
            error = None if chunk.end is None else error_of(chunk.end)
            ended_well = chunk.end is not None and error is None
            if not echoed and (chunk.token_ids or ended_well):
                echoed = True
                prompt = lives[index].queued.prompt_token_ids
                for start in range(0, len(prompt), ECHO_TOKENS):
                    yield self._echo(lives[index], start)
            if chunk.text or chunk.token_ids:
                yield codec.delta(chunk, self._engine.token_bytes, index)
            if chunk.end is not None:
                last = chunks.num_left == 0 or error is not None
                usage = usage_of(lives) if last else None
                message = error.message if error is not None else ""
                yield codec.finished(chunk.end.reason, message, usage, index)

    def _echo(self, live: LiveRequest, start: int) -> inference_pb2.GenerateResponse:
        """A piece of the prompt; its logprobs have come with the first output."""
        stop = start + ECHO_TOKENS
        logprobs = None
        if live.wants_logprobs:
            logprobs = live.some_prompt_logprobs(start, stop)
        return codec.echo(
            live.echo_text or "" if start == 0 else "",
            live.queued.prompt_token_ids[start:stop],
            logprobs,
            self._engine.token_bytes,
            first=start == 0,
        )

    async def Cancel(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: _Context
    ) -> inference_pb2.CancelResponse:
        """Ends a running request."""
        return codec.cancel_response(self._engine.cancel_by_id(request.request_id[:64]))

    async def ListModels(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: _Context
    ) -> inference_pb2.ListModelsResponse:
        """The one model served."""
        return codec.models(self._engine.model.name, self._engine.max_model_len)

    async def _abort(self, context: _Context, error: GatewayError) -> NoReturn:
        if isinstance(error, QueueFullError):
            with contextlib.suppress(ValueError):
                context.set_trailing_metadata((("retry-after", str(error.retry_after_s)),))
        await context.abort(status_of(error), error.message)
        raise AssertionError("abort raises")
