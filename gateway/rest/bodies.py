"""Reading request bodies: every limit holds while reading, before anything is made of the bytes."""

import asyncio
import json
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from gateway.core.errors import RejectReason, RequestCancelledError, RequestRejected
from gateway.core.wording import shown
from gateway.rest.errors import from_pydantic
from gateway.rest.json_size import JsonSize, json_size

BODY_TIMEOUT_S = 30.0
# Bodies up to here can't hold the event loop for long, whatever stands in them.
UNCOUNTED_BYTES = 65_536
MAX_VALUES, MAX_NAMES, MAX_CONTAINERS = 2**18, 2**15, 2**14
_Body = TypeVar("_Body", bound=BaseModel)


class BodyReader:
    """Takes JSON objects of at most max_bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    async def read(self, request: Request, schema: type[_Body]) -> _Body:
        """The body as the schema has it. Raises RequestRejected."""
        media = request.headers.get("content-type", "").split(";")[0].strip().lower()
        # Packed bodies are refused unread: their size says nothing about what they hold.
        if media != "application/json" or request.headers.get("content-encoding"):
            raise RequestRejected(
                RejectReason.MEDIA_TYPE, "The content type must be application/json, not encoded."
            )
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self._max_bytes:
            raise self._too_large()
        data = await self._read(request)
        if len(data) > UNCOUNTED_BYTES:
            check_size(await asyncio.to_thread(json_size, data))
        return parse(data, schema)

    async def _read(self, request: Request) -> bytes:
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for piece in request.stream():
                    data += piece
                    if len(data) > self._max_bytes:
                        raise self._too_large()
        except ClientDisconnect:
            raise RequestCancelledError("The client left.") from None
        except TimeoutError:
            raise RequestRejected(
                RejectReason.SLOW_BODY, f"The body did not come within {BODY_TIMEOUT_S:.0f} s."
            ) from None
        return bytes(data)

    def _too_large(self) -> RequestRejected:
        return RequestRejected(
            RejectReason.TOO_LARGE, f"The body is larger than {self._max_bytes} bytes."
        )


def check_size(size: JsonSize) -> None:
    """Refuses what would take long to make. Raises RequestRejected."""
    for count, most, things in (
        (size.num_values, MAX_VALUES, "values"),
        (size.num_names, MAX_NAMES, "names"),
        (size.num_containers, MAX_CONTAINERS, "lists and objects"),
    ):
        if count > most:
            raise RequestRejected(
                RejectReason.TOO_LARGE, f"The body holds more than {most} {things}."
            )


def parse(data: bytes, schema: type[_Body]) -> _Body:
    """JSON as RFC 8259 has it, with no name twice in an object. Raises RequestRejected."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_not_json
        )
    except UnicodeDecodeError:
        raise _refused("The body is not UTF-8.") from None
    except RecursionError:
        raise _refused("The body is nested too deeply.") from None
    except ValueError:
        # The decoder's words name positions and values; numbers of too many digits end here too.
        raise _refused("The body is not valid JSON.") from None
    if not isinstance(value, dict):
        raise _refused("The body must be a JSON object.")
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise from_pydantic(error) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            param = shown(name)
            raise RequestRejected(
                RejectReason.INVALID, f"{param}: stands more than once in an object.", param=param
            )
        seen.add(name)
    raise AssertionError("some name stands twice")


def _not_json(word: str) -> NoReturn:
    raise _refused(f"The body is not valid JSON: {word} is no number.")


def _refused(message: str) -> RequestRejected:
    return RequestRejected(RejectReason.INVALID, message)
