"""The clients' side: many streamed completions, their bytes and when those came.

While streams run only bytes and times are kept; they are read afterwards, so that the clients take
little of the machine. Every token has the same text, so the tokens of a stream are counted as the
places where that text ends.
"""

import asyncio
import bisect
import itertools
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

COMPLETIONS = "/v1/completions"
_ID = re.compile(rb'"id":"cmpl-([0-9a-f]{32})"')
_FRAME = b'data: {"id"'


class StreamError(Exception):
    """A stream is not what was asked for; the message holds its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Of one stream: when each token came (by CLOCK_MONOTONIC), and each frame."""

    request_id: bytes
    token_ns: Sequence[int]
    frame_ns: Sequence[int]


class Reader(asyncio.Protocol):
    """One request, and the bytes of its answer with the time of each piece."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self.pieces: list[tuple[int, bytes]] = []
        self.began = False  # it has had a frame: headers alone come after a while as well
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the request at once."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Keeps the bytes and their time."""
        self.pieces.append((time.monotonic_ns(), data))
        self.began = self.began or _FRAME in data

    def connection_lost(self, error: Exception | None) -> None:
        """Before `hang_up` that is the stream's end."""
        self.ended = True

    def hang_up(self) -> None:
        """Leaves, as a client that has enough."""
        if self._transport is not None:
            self._transport.abort()


def request(model: str, port: int, prompt: Sequence[int], max_tokens: int) -> bytes:
    """A streamed completion that goes on whatever its tokens are."""
    body = json.dumps(
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def arrivals(pieces: Sequence[tuple[int, bytes]], text: bytes) -> Arrivals:
    """Of the pieces of one answer whose tokens all read `text`; pure. Raises StreamError."""
    raw = b"".join(data for _, data in pieces)
    head, _, body = raw.partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0]
    found = _ID.search(body)
    if b" 200 " not in status + b" " or found is None:
        raise StreamError(f"no stream of a completion: {raw[:300]!r}")
    ends = list(itertools.accumulate(len(data) for _, data in pieces))

    def at(offset: int) -> int:
        return pieces[bisect.bisect_left(ends, offset)][0]

    start = len(raw) - len(body)
    return Arrivals(
        request_id=bytes.fromhex(found[1].decode()),
        token_ns=[at(start + m.end()) for m in re.finditer(re.escape(text), body)],
        frame_ns=[at(start + m.end()) for m in re.finditer(re.escape(_FRAME), body)],
    )


async def open_streams(
    port: int, requests: Sequence[bytes], timeout_s: float = 120.0
) -> list[Reader]:
    """All streams, each with its first frame. Raises StreamError."""
    loop = asyncio.get_running_loop()
    readers = []
    for of in requests:
        _, reader = await loop.create_connection(partial(Reader, of), "127.0.0.1", port)
        readers.append(reader)
    deadline = loop.time() + timeout_s
    while not all(reader.began for reader in readers):
        if loop.time() > deadline or any(reader.ended for reader in readers):
            raise StreamError(f"streams that began: {sum(reader.began for reader in readers)}")
        await asyncio.sleep(0.01)
    return readers
