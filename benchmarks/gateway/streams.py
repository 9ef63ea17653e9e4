"""The clients' side: many streamed completions, their bytes and when those came.

The time of a piece is when the kernel had it in the client's socket (SO_TIMESTAMPNS), and the
sockets are looked at each LOOK_S: a client that waits for each token would be woken for each on the
same two cores, by the very call with which the gateway sends, and that would be measured. Where
several pieces lie in a socket, all have the time of the last. While streams run only bytes and
times are kept; they are read afterwards. Every token has the same text, so the tokens of a stream
are counted as the places where that text ends.
"""

import bisect
import itertools
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

COMPLETIONS = "/v1/completions"
LOOK_S = 0.005
# Of Linux; the socket module does not name it. Its note is a struct timespec.
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@qq")
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


class Reader:
    """One request, and the bytes of its answer with the time at which the kernel had each piece."""

    def __init__(self, port: int, request: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._socket.sendall(request)
        self._socket.setblocking(False)
        self.pieces: list[tuple[int, bytes]] = []
        self.began = False  # it has had a frame: headers alone come after a while as well
        self.ended = False
        # Pieces with the time of the look: the kernel begins to stamp a while after it is asked.
        self.num_unstamped = 0

    def take(self, ahead_ns: int) -> None:
        """Keeps what has come; the kernel's stamps are ahead_ns ahead of CLOCK_MONOTONIC."""
        while True:
            try:
                data, notes, _, _ = self._socket.recvmsg(1 << 18, 64)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.ended = True
                return
            stamps = [_TIMESPEC.unpack(note) for _, kind, note in notes if kind == _SO_TIMESTAMPNS]
            if stamps:
                seconds, nanoseconds = stamps[0]
                at_ns = seconds * 1_000_000_000 + nanoseconds - ahead_ns
            else:
                at_ns = time.monotonic_ns()
                self.num_unstamped += 1
            self.pieces.append((at_ns, data))
            self.began = self.began or _FRAME in data

    def hang_up(self) -> None:
        """Leaves, as a client that has enough."""
        self._socket.close()


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


def read(readers: Sequence[Reader], until: Callable[[], bool]) -> None:
    """Looks at all streams each LOOK_S until `until` is so. Raises StreamError if one has ended."""
    while not until():
        time.sleep(LOOK_S)
        ahead_ns = time.clock_gettime_ns(time.CLOCK_REALTIME) - time.monotonic_ns()
        for reader in readers:
            reader.take(ahead_ns)
        if any(reader.ended for reader in readers):
            raise StreamError("a stream has ended")


def read_for(readers: Sequence[Reader], seconds: float) -> int:
    """See `read`; the number of pieces that the kernel has not stamped."""
    deadline = time.monotonic() + seconds
    before = sum(reader.num_unstamped for reader in readers)
    read(readers, lambda: time.monotonic() >= deadline)
    return sum(reader.num_unstamped for reader in readers) - before


def open_streams(port: int, requests: Sequence[bytes], timeout_s: float = 120.0) -> list[Reader]:
    """All streams, each with its first frame. Raises StreamError."""
    deadline = time.monotonic() + timeout_s
    readers = [Reader(port, of) for of in requests]

    def begun() -> bool:
        if time.monotonic() > deadline:
            raise StreamError(f"streams that began: {sum(reader.began for reader in readers)}")
        return all(reader.began for reader in readers)

    try:
        read(readers, begun)
    except StreamError:
        hang_up(readers)
        raise
    return readers


def hang_up(readers: Sequence[Reader]) -> None:
    """All of them."""
    for reader in readers:
        reader.hang_up()
