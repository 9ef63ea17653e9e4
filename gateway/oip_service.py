"""The Open Inference Protocol over gRPC, over the same engine and validator."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NoReturn

import grpc.aio
from quire.oip import open_inference_pb2 as pb
from quire.oip import open_inference_pb2_grpc

from gateway import oip_codec
from gateway.core.errors import (
    GatewayError,
    QueueFullError,
    RejectReason,
    RequestFailedError,
    RequestRejected,
    error_of,
)
from gateway.engine import Engine
from gateway.grpc_auth import tenant
from gateway.grpc_service import status_of
from gateway.live import LiveRequest
from gateway.open_inference import MAX_ID_CHARS, check_version
from gateway.settings import VERSION
from servicekit import logs

SERVICE_NAME = "inference.GRPCInferenceService"
SERVER_NAME = "quire"
# Answers of one stream that run at a time; more requests of it wait unread.
MAX_RUNNING_PER_STREAM = 256
_Context = grpc.aio.ServicerContext[Any, Any]


class OpenInferenceService(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """One model, of one version, from text to text."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._log = logs.get_logger("gateway.oip")

    async def ServerLive(  # type: ignore[override]  # noqa: N802
        self, request: pb.ServerLiveRequest, context: _Context
    ) -> pb.ServerLiveResponse:
        """The process runs."""
        return oip_codec.live(True)

    async def ServerReady(  # type: ignore[override]  # noqa: N802
        self, request: pb.ServerReadyRequest, context: _Context
    ) -> pb.ServerReadyResponse:
        """A new request would be served."""
        return oip_codec.ready(self._engine.ready)

    async def ModelReady(  # type: ignore[override]  # noqa: N802
        self, request: pb.ModelReadyRequest, context: _Context
    ) -> pb.ModelReadyResponse:
        """A new request to this model would be served."""
        await self._check_model(context, request.name, request.version)
        return oip_codec.model_ready(self._engine.ready)

    async def ServerMetadata(  # type: ignore[override]  # noqa: N802
        self, request: pb.ServerMetadataRequest, context: _Context
    ) -> pb.ServerMetadataResponse:
        """What serves."""
        return oip_codec.server_metadata(SERVER_NAME, VERSION)

    async def ModelMetadata(  # type: ignore[override]  # noqa: N802
        self, request: pb.ModelMetadataRequest, context: _Context
    ) -> pb.ModelMetadataResponse:
        """The model's tensors."""
        await self._check_model(context, request.name, request.version)
        return oip_codec.model_metadata(self._engine.model.name)

    async def ModelInfer(  # type: ignore[override]  # noqa: N802
        self, request: pb.ModelInferRequest, context: _Context
    ) -> pb.ModelInferResponse:
        """A whole answer."""
        try:
            call = oip_codec.decode_infer(request, tenant())
            live = await self._engine.submit(call.raw)
        except GatewayError as error:
            await self._abort(context, error)
        pieces: list[str] = []
        async with self._ending(live):
            while True:
                chunk = await self._engine.next_chunk(live)
                pieces.append(chunk.text)
                if chunk.end is not None:
                    break
        failed = error_of(chunk.end)
        if failed is not None:
            await self._abort(context, failed)
        end = chunk.end.reason, live.usage
        return oip_codec.infer_response(self._engine.model.name, call.call_id, "".join(pieces), end)

    async def ModelStreamInfer(  # type: ignore[override]  # noqa: N802
        self, requests: AsyncIterator[pb.ModelInferRequest], context: _Context
    ) -> None:
        """Answers side by side, told apart by their ids. An error ends its answer only."""
        slots, writing = asyncio.Semaphore(MAX_RUNNING_PER_STREAM), asyncio.Lock()
        caller = tenant()

        async def answer(request: pb.ModelInferRequest) -> None:
            try:
                async with contextlib.aclosing(self._pieces(request, caller)) as pieces:
                    async for piece in pieces:
                        async with writing:
                            await context.write(piece)
            finally:
                slots.release()

        async with asyncio.TaskGroup() as group:
            async for request in requests:
                await slots.acquire()
                group.create_task(answer(request))

    async def _pieces(
        self, request: pb.ModelInferRequest, caller: str
    ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        call_id = request.id[:MAX_ID_CHARS]
        try:
            live = await self._engine.submit(oip_codec.decode_infer(request, caller).raw)
            name = self._engine.model.name
            async with self._ending(live):
                while True:
                    chunk = await self._engine.next_chunk(live)
                    if chunk.end is not None:
                        break
                    if chunk.text:
                        piece = oip_codec.infer_response(name, call_id, chunk.text)
                        yield oip_codec.stream_response(piece, final=False)
                failed = error_of(chunk.end)
                if failed is not None:
                    raise failed
                end = chunk.end.reason, live.usage
                piece = oip_codec.infer_response(name, call_id, chunk.text, end)
                yield oip_codec.stream_response(piece, final=True)
        except GatewayError as error:
            yield oip_codec.stream_error(call_id, error)
        except Exception:
            # Other answers of this stream must not end with this one.
            self._log.exception("stream_failed")
            yield oip_codec.stream_error(call_id, RequestFailedError("The request failed."))

    @contextlib.asynccontextmanager
    async def _ending(self, live: LiveRequest) -> AsyncIterator[None]:
        """Ends the request with whatever happens to its call."""
        try:
            yield
        finally:
            self._engine.cancel(live)

    async def _check_model(self, context: _Context, name: str, version: str) -> None:
        try:
            check_version(version)
            if name != self._engine.model.name:
                raise RequestRejected(
                    RejectReason.MODEL_NOT_FOUND, "The model is not served here.", param="name"
                )
        except GatewayError as error:
            await self._abort(context, error)

    async def _abort(self, context: _Context, error: GatewayError) -> NoReturn:
        if isinstance(error, QueueFullError):
            with contextlib.suppress(ValueError):
                context.set_trailing_metadata((("retry-after", str(error.retry_after_s)),))
        await context.abort(status_of(error), error.message)
        raise AssertionError("abort raises")
