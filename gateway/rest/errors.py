"""The one place where the gateway's errors become HTTP answers.

What is said is the same for every protocol; only the shape of the object around it differs.
"""

import json
from collections.abc import Mapping
from enum import Enum
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
from gateway.core.keys import UnauthorizedError
from gateway.core.wording import shown


class Shape(Enum):
    """Whose error object it is."""

    OPENAI = "openai"
    TGI = "tgi"
    OPEN_INFERENCE = "open_inference"


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
# Status, and the words that OpenAI's and TGI's clients know.
_STATUS: tuple[tuple[type[GatewayError], int, str, str], ...] = (
    (RequestRejected, 400, "invalid_request_error", "validation"),
    (UnauthorizedError, 401, "invalid_request_error", "unauthorized"),
    (QueueFullError, 429, "rate_limit_error", "overloaded"),
    (UnavailableError, 503, "service_unavailable_error", "overloaded"),
    (DeadlineError, 504, "timeout_error", "generation"),
    (RequestCancelledError, 499, "cancelled_error", "generation"),
    (GatewayError, 500, "server_error", "generation"),
)


def _row_of(error: GatewayError) -> tuple[int, str, str]:
    return next(row[1:] for row in _STATUS if isinstance(error, row[0]))


def status_of(error: GatewayError) -> int:
    """HTTP status."""
    if isinstance(error, RequestRejected):
        return _REJECTED[error.reason]
    return _row_of(error)[0]


def body_of(error: GatewayError, shape: Shape = Shape.OPENAI) -> dict[str, Any]:
    """The error object."""
    _, kind, tgi_kind = _row_of(error)
    match shape:
        case Shape.TGI:
            return {"error": error.message, "error_type": tgi_kind}
        case Shape.OPEN_INFERENCE:
            return {"error": error.message}
        case Shape.OPENAI:
            param = error.param if isinstance(error, RequestRejected) else None
            return {
                "error": {
                    "message": error.message,
                    "type": kind,
                    "param": param,
                    "code": error.code,
                }
            }


def to_json(value: object) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def response_of(
    error: GatewayError,
    shape: Shape = Shape.OPENAI,
    more_headers: Mapping[str, str] | None = None,
) -> Response:
    """The whole answer."""
    headers = dict(more_headers or {})
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, UnavailableError):
        headers["retry-after"] = "1"
    elif isinstance(error, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    return Response(
        to_json(body_of(error, shape)), status_of(error), headers, media_type="application/json"
    )


def from_pydantic(error: ValidationError) -> RequestRejected:
    """The first thing wrong with a body's types. Input values are not repeated."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Names of union members are pydantic's own business.
    path = [str(p) for p in first["loc"] if not str(p).startswith(("list[", "function-"))]
    param = shown(".".join(p for p in path if p not in ("str", "int")), 200) or None
    message = f"{param}: {first['msg']}." if param else f"{first['msg']}."
    return RequestRejected(RejectReason.INVALID, message[:300], param=param)
