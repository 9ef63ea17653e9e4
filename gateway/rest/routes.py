"""The REST application: its routes, the OpenAI ones' handlers, and what becomes of errors."""

from datetime import UTC, datetime
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.core.errors import GatewayError, RejectReason, RequestRejected
from gateway.engine import Engine
from gateway.rest import openapi
from gateway.rest.answer import Answer
from gateway.rest.auth import Guarded, Open, Ring, WithKeys, caller_of, no_keys, shape_of
from gateway.rest.bodies import BodyReader
from gateway.rest.errors import response_of, to_json
from gateway.rest.oip import OpenInferenceRoutes
from gateway.rest.schemas import ChatBody, CompletionBody
from gateway.rest.sse import Head
from gateway.rest.tgi import TgiRoutes
from gateway.rest.tokenize import TokenizeRoutes
from gateway.settings import VERSION
from servicekit import logs

_Body = TypeVar("_Body", CompletionBody, ChatBody)
_log = logs.get_logger("gateway.rest")


class Rest:
    """The application over one engine. `ring` gives the keys in force."""

    def __init__(
        self,
        engine: Engine,
        registry: CollectorRegistry,
        max_body_bytes: int,
        ring: Ring = no_keys,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._ring = ring
        self._reader = BodyReader(max_body_bytes)
        self._created = int(datetime.now(tz=UTC).timestamp())
        self._described: dict[int, bytes] = {}

    def routes(self) -> list[Open]:
        """Every route. An Open one that is not Guarded needs no key; a test holds their list."""
        return [
            Guarded("/v1/completions", self.completions, methods=["POST"]),
            Guarded("/v1/chat/completions", self.chat, methods=["POST"]),
            Guarded("/v1/models", self.models),
            Guarded("/v1/models/{name:path}", self.model),
            *TokenizeRoutes(self._engine, self._reader).routes(),
            *TgiRoutes(self._engine, self._reader).routes(),
            *OpenInferenceRoutes(self._engine, self._reader).routes(),
            Guarded("/openapi.json", self.openapi),
            Guarded("/metrics", self.metrics),
            Open("/health", self.health),
            Open("/ready", self.ready),
            Open("/version", self.version),
        ]

    def app(self) -> ASGIApp:
        """The ASGI application."""
        handlers = {GatewayError: _on_error, HTTPException: _on_http_error, Exception: _on_bug}
        app = Starlette(routes=self.routes(), exception_handlers=handlers)  # type: ignore[arg-type]
        # A redirect would be built from the Host header, and would say that a route exists.
        app.router.redirect_slashes = False
        return WithKeys(app, self._ring)

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

    async def openapi(self, _: Request) -> Response:
        """GET /openapi.json. Made once for a context: to make it takes as long as many requests."""
        context = self._engine.max_model_len
        if context not in self._described:
            document = openapi.document(self._engine.model, context)
            self._described = {context: to_json(document)}
        return Response(self._described[context], media_type="application/json")

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
        caller = caller_of(request)
        body = await self._reader.read(request, schema)
        lives = await self._engine.submit_all(
            body.to_raws(
                client_id=caller.client_id, tenant=caller.tenant, traceparent=caller.traceparent
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
        return Answer(
            self._engine, lives, head, stream=bool(body.stream), client_id=caller.client_id
        )


async def _on_error(request: Request, error: GatewayError) -> Response:
    return response_of(error, shape_of(request.scope))


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    """What the router itself has to say."""
    if error.status_code == 405:
        refused = RequestRejected(RejectReason.METHOD, "The method is not allowed here.")
    else:
        refused = RequestRejected(RejectReason.NOT_FOUND, "There is nothing at this path.")
    return response_of(refused, shape_of(request.scope), error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    """The text of an exception stays in the log."""
    _log.error("request_failed", error=type(error).__name__, exc_info=error)
    failed = GatewayError("The gateway failed on this request.")
    return response_of(failed, shape_of(request.scope))


def _json(value: object, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")
