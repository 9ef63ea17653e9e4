"""Keys on the gRPC port: every method but health needs one, reflection too."""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NoReturn

import grpc
import grpc.aio

from gateway.core.keys import KeyRing, UnauthorizedError

# Allowed by name; what is added to the server later is closed until it is added here.
OPEN_METHODS = frozenset(f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch", "List"))
_tenant: ContextVar[str] = ContextVar("tenant", default="")


def tenant(_: object = None) -> str:
    """The tenant of the call that runs; "" where there are no keys."""
    return _tenant.get()


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Looks at the metadata `authorization` before a handler is looked at."""

    def __init__(self, ring: Callable[[], KeyRing]) -> None:
        self._ring = ring

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's own handler, or one that refuses at once whatever the method's kind is."""
        if details.method not in OPEN_METHODS:
            metadata = details.invocation_metadata or ()
            shown = [_bytes(value) for name, value in metadata if name == "authorization"]
            try:
                # A call is one task, which the handler runs in as well.
                _tenant.set(self._ring().owner(shown).tenant)
            except UnauthorizedError as error:
                return _refusal(error.message)
        return await continuation(details)


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _refusal(message: str) -> Any:
    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)
        raise AssertionError("abort raises")

    # This kind is called before the client has sent a message, so that nobody can hold it open.
    return grpc.stream_stream_rpc_method_handler(refuse)  # type: ignore[arg-type]
