"""The gateway's error tree. REST and gRPC each map it to their status codes in one table.

Messages are written for clients: no paths, addresses or exception texts.
"""

from enum import Enum

from gateway.core.types import FinishReason, Terminal


class GatewayError(Exception):
    """Base: an answer other than output. `code` is a stable word for programs."""

    code = "internal_error"

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.code


class RejectReason(Enum):
    """What kind of bad input it was."""

    INVALID = "invalid_value"
    UNSUPPORTED = "unsupported_parameter"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    METHOD = "method_not_allowed"
    TOO_LARGE = "request_too_large"
    MEDIA_TYPE = "unsupported_media_type"
    HOST = "host_not_allowed"
    SLOW_BODY = "request_timeout"


class RequestRejected(GatewayError):  # noqa: N818 (the word of the whole code base)
    """The input can't be served; `param` names the field where there is one."""

    def __init__(self, reason: RejectReason, message: str, *, param: str | None = None) -> None:
        super().__init__(message, code=reason.value)
        self.reason = reason
        self.param = param


class QueueFullError(GatewayError):
    """The queue is at its bound."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(GatewayError):
    """Nothing can serve the request now."""

    code = "service_unavailable"


class DeadlineError(GatewayError):
    """The request's deadline passed."""

    code = "deadline_exceeded"


class RequestCancelledError(GatewayError):
    """Someone asked for the end of the request."""

    code = "cancelled"


class RequestFailedError(GatewayError):
    """The request failed; others are not affected."""

    code = "request_failed"


def error_of(end: Terminal) -> GatewayError | None:
    """The error that an end stands for; None for STOP and LENGTH."""
    match end.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.REJECTED:
            return RequestRejected(
                RejectReason.INVALID, end.message or "The request can never be served."
            )
        case FinishReason.DEADLINE:
            return DeadlineError(end.message or "The request's deadline passed.", code=end.code)
        case FinishReason.UNAVAILABLE:
            return UnavailableError(end.message or "No worker is available.", code=end.code)
        case FinishReason.CANCELLED:
            return RequestCancelledError(end.message or "The request was cancelled.", code=end.code)
        case _:
            return RequestFailedError(end.message or "The request failed.", code=end.code)
