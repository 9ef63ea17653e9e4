"""The one place where the gateway's errors become HTTP answers."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from gateway.core.errors import (
    DeadlineError,
    GatewayError,
    QueueFullError,
    RejectReason,
    RequestCancelledError,
    RequestRejected,
    UnavailableError,
)

_REJECTED: Mapping[RejectReason, int] = {
    RejectReason.INVALID: 400,
    RejectReason.UNSUPPORTED: 400,
    RejectReason.MODEL_NOT_FOUND: 404,
    RejectReason.NOT_FOUND: 404,
    RejectReason.METHOD: 405,
    RejectReason.TOO_LARGE: 413,
    RejectReason.MEDIA_TYPE: 415,
    RejectReason.HOST: 403,
    RejectReason.SLOW_BODY: 408,
}
_STATUS: tuple[tuple[type[GatewayError], int, str], ...] = (
    (QueueFullError, 429, "rate_limit_error"),
    (UnavailableError, 503, "service_unavailable_error"),
    (DeadlineError, 504, "timeout_error"),
    (RequestCancelledError, 499, "cancelled_error"),
)


def status_of(error: GatewayError) -> int:
    """HTTP status."""
    if isinstance(error, RequestRejected):
        return _REJECTED[error.reason]
    return next((status for kind, status, _ in _STATUS if isinstance(error, kind)), 500)


def body_of(error: GatewayError) -> dict[str, Any]:
    """OpenAI's error object."""
    param = None
    if isinstance(error, RequestRejected):
        kind, param = "invalid_request_error", error.param
    else:
        kind = next((t for cls, _, t in _STATUS if isinstance(error, cls)), "server_error")
    return {"error": {"message": error.message, "type": kind, "param": param, "code": error.code}}


def to_json(value: object) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def response_of(error: GatewayError) -> Response:
    """The whole answer."""
    headers = {}
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, UnavailableError):
        headers["retry-after"] = "1"
    return Response(
        to_json(body_of(error)), status_of(error), headers, media_type="application/json"
    )


def from_pydantic(error: ValidationError) -> RequestRejected:
    """The first thing wrong with a body's types. Input values are not repeated."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Names of union members are pydantic's own business.
    path = [str(p) for p in first["loc"] if not str(p).startswith(("list[", "function-"))]
    param = ".".join(p for p in path if p not in ("str", "int"))[:200] or None
    message = f"{param}: {first['msg']}." if param else f"{first['msg']}."
    return RequestRejected(RejectReason.INVALID, message[:300], param=param)
