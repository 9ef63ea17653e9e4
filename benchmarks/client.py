"""A client of the REST interface that costs little while it measures.

Owns one connection a call. While an answer arrives only its bytes and their times are kept; reading
the events out of them happens after the end, so that client and server can share a small machine.
"""

import asyncio
import bisect
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one call gave. Times are seconds of one monotonic clock.

    `broken` says how the transport failed, empty if it did not. finish_reasons and errors hold
    every one that came, so that a second terminal event is seen; `done` counts [DONE] lines.
    text_times_s has the arrival of each piece of text; token_ids
    and the arrival of each, token_times_s, are empty unless the request asked for return_token_ids.
    """

    started_s: float
    ended_s: float
    status: int = 0
    text: str = ""
    text_times_s: tuple[float, ...] = ()
    token_ids: tuple[int, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    done: int = 0
    usage: Mapping[str, Any] = field(default_factory=dict)
    broken: str = ""
    token_times_s: tuple[float, ...] = ()

    @property
    def num_terminal(self) -> int:
        """Terminal events seen."""
        return len(self.finish_reasons) + len(self.errors)

    @property
    def num_tokens(self) -> int:
        """Output tokens by the answer's own usage."""
        return int(self.usage.get("completion_tokens", 0))

    @property
    def ttft_s(self) -> float | None:
        """Time to the first text."""
        return self.text_times_s[0] - self.started_s if self.text_times_s else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between one piece of text and the next."""
        return tuple(b - a for a, b in itertools.pairwise(self.text_times_s))

    @property
    def e2e_s(self) -> float:
        """Time from sending to the last byte."""
        return self.ended_s - self.started_s

    def problem(self, num_tokens: int) -> str:
        """Why this is not a whole answer of exactly num_tokens tokens; empty if it is."""
        if self.broken:
            return f"transport: {self.broken}"
        if self.errors or self.status != 200:
            return f"status {self.status}: {'; '.join(self.errors) or self.text[:200]}"
        if self.finish_reasons != ("length",):
            return f"finish reasons {list(self.finish_reasons)}, expected one 'length'"
        if self.num_tokens != num_tokens:
            return f"{self.num_tokens} tokens, asked for {num_tokens}"
        if self.token_ids and len(self.token_ids) != num_tokens:
            return f"{len(self.token_ids)} token ids came, asked for {num_tokens}"
        if not 1 <= len(self.text_times_s) <= num_tokens:
            return f"{num_tokens} tokens in {len(self.text_times_s)} pieces of text"
        return ""


class Exchange(asyncio.Protocol):
    """One request and the bytes of its answer; `progress` grows with every event received."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pieces: list[tuple[float, bytes]] = []
        self.progress = 0
        self.broken = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the request at once."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Keeps the bytes and their time."""
        self.pieces.append((time.perf_counter(), data))
        self.progress += data.count(b"data: ")

    def connection_lost(self, error: Exception | None) -> None:
        """The answer has ended, as agreed by `Connection: close`."""
        self.broken = repr(error) if error is not None else ""
        if not self.ended.done():
            self.ended.set_result(None)

    def hang_up(self) -> None:
        """Drops the connection, as a client that goes away does."""
        if self._transport is not None:
            self._transport.abort()


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Where the gateway is, how long an answer may take, and the API key where there are keys."""

    host: str
    port: int
    timeout_s: float = 600.0
    key: str = ""

    async def call(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        watch: "list[Exchange] | None" = None,
    ) -> Answer:
        """POSTs `body` (GETs without one). A cancelled call drops its connection.

        The exchange is appended to `watch` when it starts, for callers that follow its progress.
        """
        started_s = time.perf_counter()
        exchange = Exchange(self._request(path, body))
        if watch is not None:
            watch.append(exchange)
        broken = ""
        try:
            async with asyncio.timeout(self.timeout_s):
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: exchange, self.host, self.port)
                await exchange.ended
            broken = exchange.broken
        except (OSError, TimeoutError) as error:
            broken = f"{type(error).__name__} {error}"
        finally:
            exchange.hang_up()
        return read_answer(exchange.pieces, started_s, broken)

    async def complete(
        self, body: Mapping[str, Any], *, watch: "list[Exchange] | None" = None
    ) -> Answer:
        """A streamed completion with its usage."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return await self.call(COMPLETIONS, {**body, **options}, watch=watch)

    def _request(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        payload = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        bearer = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        head = (
            f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\n"
            f"Host: {self.host}:{self.port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
            f"{bearer}\r\n"
        )
        return head.encode() + payload


def read_answer(pieces: list[tuple[float, bytes]], started_s: float, broken: str = "") -> Answer:
    """The answer in the bytes of a connection; pure. Streamed and whole answers look the same."""
    ended_s = pieces[-1][0] if pieces else started_s
    raw = b"".join(data for _, data in pieces)
    head, found, rest = raw.partition(b"\r\n\r\n")
    if not found:
        return Answer(started_s=started_s, ended_s=ended_s, broken=broken or "no answer")
    status = int(head.split(b" ", 2)[1])
    headers = head.lower()
    ends_s = list(itertools.accumulate(len(data) for _, data in pieces))
    if b"transfer-encoding: chunked" in headers:
        spans, whole = _dechunk(rest, len(raw) - len(rest))
        broken = broken or ("" if whole else "answer cut short")
    else:
        spans = [(len(raw), rest)]
    events = _Events(started_s, ended_s, status)
    if b"text/event-stream" in headers:
        text, offsets = _lines(spans)
        for line, offset in zip(text, offsets, strict=True):
            at = pieces[min(bisect.bisect_left(ends_s, offset), len(pieces) - 1)][0]
            events.line(line, at)
    else:
        events.document(b"".join(data for _, data in spans), ended_s)
    return events.answer(broken)


def _dechunk(body: bytes, offset: int) -> tuple[list[tuple[int, bytes]], bool]:
    """Chunks as (offset of the end in the raw answer, data), and whether the last one came."""
    spans: list[tuple[int, bytes]] = []
    at = 0
    while True:
        line = body.find(b"\r\n", at)
        if line < 0:
            return spans, False
        size = int(body[at:line].split(b";")[0], 16)
        start, end = line + 2, line + 2 + size
        if size == 0:
            return spans, True
        if end > len(body):
            return spans, False
        spans.append((offset + end, body[start:end]))
        at = end + 2


def _lines(spans: list[tuple[int, bytes]]) -> tuple[list[bytes], list[int]]:
    """Non-empty lines of the body, each with the raw offset at which it was whole."""
    lines: list[bytes] = []
    offsets: list[int] = []
    left = b""
    for end, data in spans:
        *whole, left = (left + data).split(b"\n")
        for line in whole:
            if line.strip():
                lines.append(line.strip())
                offsets.append(end)
    return lines, offsets


class _Events:
    """Gathers the events of one answer."""

    def __init__(self, started_s: float, ended_s: float, status: int) -> None:
        self._started_s, self._ended_s, self._status = started_s, ended_s, status
        self._text: list[str] = []
        self._times_s: list[float] = []
        self._token_ids: list[int] = []
        self._token_times_s: list[float] = []
        self._finish: list[str] = []
        self._errors: list[str] = []
        self._done = 0
        self._usage: Mapping[str, Any] = {}

    def line(self, line: bytes, at_s: float) -> None:
        """One line of an event stream; comments keep the connection alive and say nothing."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self._done += 1
        else:
            self.document(data, at_s)

    def document(self, data: bytes, at_s: float) -> None:
        """One JSON document: a chunk, a whole answer or an error."""
        try:
            document = json.loads(data)
        except ValueError:
            self._errors.append(f"not JSON: {data[:100]!r}")
            return
        if "error" in document:
            error = document["error"]
            self._errors.append(str(error.get("message", error)))
        for choice in document.get("choices") or ():
            message = choice.get("delta") or choice.get("message") or {}
            text = choice.get("text") or message.get("content") or ""
            if text:
                self._text.append(text)
                self._times_s.append(at_s)
            token_ids = choice.get("token_ids") or ()
            self._token_ids += token_ids
            self._token_times_s += [at_s] * len(token_ids)
            if choice.get("finish_reason"):
                self._finish.append(choice["finish_reason"])
        self._usage = document.get("usage") or self._usage

    def answer(self, broken: str) -> Answer:
        """All of it."""
        return Answer(
            started_s=self._started_s,
            ended_s=self._ended_s,
            status=self._status,
            text="".join(self._text),
            text_times_s=tuple(self._times_s),
            token_ids=tuple(self._token_ids),
            token_times_s=tuple(self._token_times_s),
            finish_reasons=tuple(self._finish),
            errors=tuple(self._errors),
            done=self._done,
            usage=self._usage,
            broken=broken,
        )
