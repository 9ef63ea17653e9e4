"""Who may call a route: deny by default, and never by the text of a path.

A route is a `Guarded` one, which asks for a key before it does anything, or an `Open` one. The
router finds the route first, so that no spelling of a path can separate the two. Without keys all
routes are open to this machine only; `LocalOnly` then keeps pages of other sites out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core.errors import RejectReason, RequestRejected
from gateway.core.keys import KeyRing
from gateway.rest.errors import Shape, response_of

Ring = Callable[[], KeyRing | None]
MAX_ID_CHARS = 128
# The server's own `send`: of an answer that has begun, Starlette's wrappers only pass it on.
PLAIN_SEND = "quire.send"
_TENANT = "quire.tenant"
_SHAPE = "quire.shape"
_RING = "quire.ring"
_LOCAL = frozenset({"127.0.0.1", "localhost", "[::1]"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks. `tenant` is "" where there are no keys; `client_id` is only echoed and logged."""

    tenant: str
    client_id: str
    traceparent: str


class Open(Route):
    """A route that needs no key: health, readiness, version."""

    shape = Shape.OPENAI

    def shaped(self, shape: Shape) -> Self:
        """The same, with errors in another protocol's shape."""
        self.shape = shape
        return self

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Leaves word of the shape, then hands on."""
        scope[_SHAPE] = self.shape
        await super().handle(scope, receive, send)


class Guarded(Open):
    """A route that needs a key, whatever the method, where there are keys at all."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises UnauthorizedError before anything of the request is looked at."""
        scope[_SHAPE] = self.shape
        ring = scope[_RING]()
        if ring is not None:
            shown = [value for name, value in scope["headers"] if name == b"authorization"]
            scope[_TENANT] = ring.owner(shown).tenant
        await super().handle(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Who was let in, and what they call their request."""
    headers = request.headers
    named = headers.get("x-request-id", "")[:MAX_ID_CHARS]
    return Caller(
        tenant=request.scope.get(_TENANT, ""),
        client_id="".join(c for c in named if c.isascii() and c.isprintable()),
        traceparent=headers.get("traceparent", ""),
    )


def shape_of(scope: Scope) -> Shape:
    """The shape of this request's errors."""
    # Where no route was found the path decides, on nothing but the form of the 404.
    unrouted = Shape.OPEN_INFERENCE if scope["path"].startswith("/v2/") else Shape.OPENAI
    shape = scope.get(_SHAPE, unrouted)
    assert isinstance(shape, Shape)
    return shape


def no_keys() -> None:
    """The ring of a gateway that has none."""


class WithKeys:
    """The border of the application: brings the ring in force, or has only this machine served."""

    def __init__(self, app: ASGIApp, ring: Ring) -> None:
        self._app = app
        self._ring = ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks, then hands on."""
        if scope["type"] != "http":
            raise RuntimeError(f"unexpected scope {scope['type']}")
        scope[_RING] = self._ring
        scope[PLAIN_SEND] = send
        if self._ring() is None and not _is_local(scope):
            error = RequestRejected(RejectReason.HOST, "The Host header must name this machine.")
            await response_of(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_local(scope: Scope) -> bool:
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    return len(hosts) == 1 and _host_name(hosts[0]) in _LOCAL


def _host_name(value: bytes) -> str:
    """The name in a Host header, "" if it is malformed."""
    text = value.decode("latin-1").lower()
    name, _, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not name:
        return text
    return name if port == "" or (port.isascii() and port.isdigit()) else ""
