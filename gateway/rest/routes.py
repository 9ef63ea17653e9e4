"""The REST routes, and the checks before them: host, content type, size of the body."""

import asyncio
from datetime import UTC, datetime
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core.errors import GatewayError, RejectReason, RequestRejected
from gateway.engine import Engine
from gateway.rest.answer import Answer
from gateway.rest.errors import from_pydantic, response_of, to_json
from gateway.rest.schemas import ChatBody, CompletionBody
from gateway.rest.sse import Head
from gateway.settings import VERSION
from servicekit import logs

BODY_TIMEOUT_S = 30.0
_LOCAL = frozenset({"127.0.0.1", "localhost", "[::1]"})
_Body = TypeVar("_Body", CompletionBody, ChatBody)
_log = logs.get_logger("gateway.rest")


class Rest:
    """Handlers over one engine."""

    def __init__(self, engine: Engine, registry: CollectorRegistry, max_body_bytes: int) -> None:
        self._engine = engine
        self._registry = registry
        self._max_body_bytes = max_body_bytes
        self._created = int(datetime.now(tz=UTC).timestamp())

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
        ]
        handlers = {GatewayError: _on_error, HTTPException: _on_http_error, Exception: _on_bug}
        return LocalOnly(Starlette(routes=routes, exception_handlers=handlers))  # type: ignore[arg-type]

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._generate(request, CompletionBody)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(request, ChatBody)

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        if request.path_params["name"] != self._engine.model.name:
            raise RequestRejected(
                RejectReason.MODEL_NOT_FOUND, "The model is not served here.", param="model"
            )
        return _json(self._model())

    async def health(self, _: Request) -> Response:
        """The process is well and not leaving."""
        draining = self._engine.draining
        return _json({"status": "draining" if draining else "ok"}, 503 if draining else 200)

    async def ready(self, _: Request) -> Response:
        """A new request would be served."""
        ready = self._engine.ready
        return _json({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def version(self, _: Request) -> Response:
        """GET /version."""
        return _json({"version": VERSION})

    async def metrics(self, _: Request) -> Response:
        """GET /metrics."""
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")

    def _model(self) -> dict[str, object]:
        return {
            "id": self._engine.model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "quire",
            "max_model_len": self._engine.max_model_len,
        }

    async def _generate(self, request: Request, schema: type[_Body]) -> Response:
        data = await self._read_body(request)
        client_id = _printable(request.headers.get("x-request-id", ""))
        try:
            body = schema.model_validate_json(data)
        except ValidationError as error:
            raise from_pydantic(error) from error
        lives = await self._engine.submit_all(
            body.to_raws(
                client_id=client_id, traceparent=request.headers.get("traceparent", "")
            )
        )
        head = Head(
            public_id=lives[0].public_id,
            created=int(datetime.now(tz=UTC).timestamp()),
            model=self._engine.model.name,
            chat=schema is ChatBody,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            return_token_ids=bool(body.return_token_ids),
        )
        return Answer(self._engine, lives, head, stream=bool(body.stream), client_id=client_id)

    async def _read_body(self, request: Request) -> bytes:
        """The body, refused as soon as it is seen to be too large."""
        media = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if media != "application/json" or request.headers.get("content-encoding"):
            raise RequestRejected(
                RejectReason.MEDIA_TYPE, "The content type must be application/json, not encoded."
            )
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self._max_body_bytes:
            raise self._too_large()
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for piece in request.stream():
                    data += piece
                    if len(data) > self._max_body_bytes:
                        raise self._too_large()
        except TimeoutError:
            raise RequestRejected(
                RejectReason.SLOW_BODY, f"The body did not come within {BODY_TIMEOUT_S:.0f} s."
            ) from None
        return bytes(data)

    def _too_large(self) -> RequestRejected:
        return RequestRejected(
            RejectReason.TOO_LARGE, f"The body is larger than {self._max_body_bytes} bytes."
        )


class LocalOnly:
    """Refuses requests whose Host is not this machine: a web page must not reach a local server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks, then hands on."""
        if scope["type"] != "http":
            raise RuntimeError(f"unexpected scope {scope['type']}")
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) == 1 and _host_name(hosts[0]) in _LOCAL:
            await self._app(scope, receive, send)
            return
        error = RequestRejected(RejectReason.HOST, "The Host header must name this machine.")
        await response_of(error)(scope, receive, send)


def _host_name(value: bytes) -> str:
    """The name in a Host header, "" if it is malformed."""
    text = value.decode("latin-1").lower()
    name, _, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not name:
        return text
    return name if port == "" or (port.isascii() and port.isdigit()) else ""


def _printable(text: str) -> str:
    """A client's id as it may be echoed in a header."""
    return "".join(c for c in text[:128] if c.isascii() and c.isprintable())


def _json(value: object, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return response_of(error)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return response_of(RequestRejected(RejectReason.METHOD, "Method not allowed."))
    return response_of(RequestRejected(RejectReason.NOT_FOUND, "Not found."))


async def _on_bug(_: Request, error: Exception) -> Response:
    _log.error("unhandled", exc_info=error)
    return response_of(GatewayError("Internal error."))
