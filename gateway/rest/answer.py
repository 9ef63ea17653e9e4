"""The answer to the live requests of one call, as a stream or whole.

In a stream comments go out in silence, and errors are events. The samples of a prompt and several
prompts share it; the first that fails ends it, and the others with it.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.chunks import Chunks
from gateway.core.errors import error_of
from gateway.core.output import Chunk
from gateway.core.types import Usage
from gateway.engine import Engine
from gateway.live import LiveRequest, usage_of
from gateway.rest import eager, live_answer
from gateway.rest.auth import PLAIN_SEND
from gateway.rest.errors import response_of, to_json
from gateway.rest.live_answer import LiveAnswer
from gateway.rest.logprobs import ChatLogprobs, CompletionLogprobs, LogprobWriter
from gateway.rest.sse import (
    KEEP_ALIVE,
    Choice,
    Echo,
    Framer,
    Head,
    closing,
    failing,
    whole_answer,
)

# A body of more logprobs is written in a thread: it would hold the loop for too long.
MANY_LOGPROBS = 1024


class Answer(LiveAnswer):
    """Of OpenAI's interfaces; the requests of several prompts and samples share it."""

    def __init__(
        self,
        engine: Engine,
        lives: Sequence[LiveRequest],
        head: Head,
        *,
        stream: bool,
        client_id: str,
    ) -> None:
        super().__init__(engine, lives, client_id)
        self._head = head
        self._stream = stream

    async def _answer(self, chunks: Chunks, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream:
            first = await self._first(chunks)
            await self._begin(send)
            await self._send_stream(chunks, first, scope[PLAIN_SEND])
        else:
            response = await self._whole(chunks)
            await response(scope, receive, send)

    async def _send_stream(
        self, chunks: Chunks, first: tuple[int, Chunk] | None, send: Send
    ) -> None:
        async with asyncio.timeout(None) as limit:
            async with _Pulse(send, limit) as pulse:
                await self._send_frames(chunks, first, pulse)

    async def _send_frames(
        self, chunks: Chunks, first: tuple[int, Chunk] | None, pulse: "_Pulse"
    ) -> None:
        framers: list[Framer | None] = [None] * len(self._lives)

        def write(index: int, chunk: Chunk) -> bool:
            framer = framers[index]
            if framer is None or chunk.end is not None:
                return False
            frames = framer.delta(chunk)
            return not frames or pulse.begin(frames)

        last = False
        while not last:
            index, chunk = first or await chunks.next(write)
            first, frames = None, b""
            if pulse.behind:
                await pulse.catch_up()
                continue
            error = None if chunk.end is None else error_of(chunk.end)
            last = chunks.num_left == 0 or error is not None
            ended = chunk.end is not None and error is None
            if chunk.text or chunk.token_ids or ended:
                framer = framers[index]
                if framer is None:
                    framer = framers[index] = self._framer(index)
                    frames = await self._opening(framer, self._lives[index])
                frames += framer.delta(chunk)
                if chunk.end is not None and ended:
                    frames += framer.ending(chunk.end.reason)
            if error is not None:
                frames += failing(error)
            elif last:
                frames += closing(self._head, self._usage())
            if last:
                await pulse.finish(frames)
            elif frames and not pulse.begin(frames):
                await pulse.catch_up()

    def _framer(self, index: int) -> Framer:
        return Framer(self._head, index, self._usage, self._writer(self._lives[index]))

    async def _opening(self, framer: Framer, live: LiveRequest) -> bytes:
        def write() -> bytes:
            return framer.opening(live.queued.prompt_token_ids, _echo(live))

        return await asyncio.to_thread(write) if _num_scored(live) > MANY_LOGPROBS else write()

    async def _whole(self, chunks: Chunks) -> Response:
        choices = [Choice(prompt_token_ids=live.queued.prompt_token_ids) for live in self._lives]
        while chunks.num_left:
            index, chunk = await chunks.next()
            choices[index].add(chunk)
            error = None if chunk.end is None else error_of(chunk.end)
            if error is not None:
                return response_of(error)
        num_rows = sum(len(choice.logprobs) for choice in choices)
        if num_rows + sum(map(_num_scored, self._lives)) > MANY_LOGPROBS:
            data = await asyncio.to_thread(self._body, choices)
        else:
            data = self._body(choices)
        headers = {"x-request-id": self._request_id}
        return Response(data, headers=headers, media_type="application/json")

    def _body(self, choices: Sequence[Choice]) -> bytes:
        shown = [
            choice.shown(self._head, i, _echo(live), self._writer(live))
            for i, (choice, live) in enumerate(zip(choices, self._lives, strict=True))
        ]
        return to_json(whole_answer(self._head, shown, self._usage()))

    def _usage(self) -> Usage:
        return usage_of(self._lives)

    def _writer(self, live: LiveRequest) -> LogprobWriter | None:
        if not live.wants_logprobs:
            return None
        if self._head.chat:
            return ChatLogprobs(self._engine.token_bytes)
        skip = live.skip_special_tokens
        return CompletionLogprobs(
            self._engine.token_bytes,
            partial(self._engine.detokenizer, skip_special_tokens=skip),
            self._engine.detokenizer(skip_special_tokens=skip, after=live.context),
        )


class _Pulse:
    """Sends frames, and comments when nothing was sent for KEEP_ALIVE_S.

    A frame that a client does not take within SEND_TIMEOUT_S ends `limit`. One task watches a whole
    stream, so that a frame costs no timer of its own.
    """

    def __init__(self, send: Send, limit: asyncio.Timeout) -> None:
        self._send = send
        self._limit = limit
        self._time = asyncio.get_running_loop().time
        self._sent_s = self._time()
        self._sending_since_s = 0.0
        self._rest: eager.Rest | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "_Pulse":
        self._task = asyncio.get_running_loop().create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()
        if self._rest is not None:
            self._rest.close()

    @property
    def behind(self) -> bool:
        """The client has not taken what was begun: `catch_up` comes next."""
        return self._rest is not None

    def begin(self, frames: bytes) -> bool:
        """Sends a piece of the body; False if the client is behind."""
        assert self._rest is None, "one piece after the other"
        sending = self._send({"type": "http.response.body", "body": frames, "more_body": True})
        self._sent_s = self._time()
        self._rest = eager.begin(sending)
        if self._rest is None:
            return True
        self._sending_since_s = self._sent_s
        return False

    async def catch_up(self) -> None:
        """Until the client has taken what was begun."""
        assert self._rest is not None
        await self._rest
        self._rest = None
        self._sending_since_s = 0.0
        self._sent_s = self._time()

    async def finish(self, frames: bytes) -> None:
        """The last piece; nothing may follow it, and so no comment."""
        await self._stop()
        async with asyncio.timeout(live_answer.SEND_TIMEOUT_S):
            await self._send({"type": "http.response.body", "body": frames, "more_body": False})

    async def _comment(self) -> None:
        await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        self._sent_s = self._time()

    async def _stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await self._task

    async def _beat(self) -> None:
        while True:
            now_s = self._time()
            if self._sending_since_s:
                wait_s = self._sending_since_s + live_answer.SEND_TIMEOUT_S - now_s
                if wait_s <= 0:
                    break
            else:
                wait_s = self._sent_s + live_answer.KEEP_ALIVE_S - now_s
                if wait_s <= 0:
                    try:
                        async with asyncio.timeout(live_answer.SEND_TIMEOUT_S):
                            await self._comment()
                    except TimeoutError:
                        break
                    continue
            await asyncio.sleep(wait_s)
        self._limit.reschedule(self._time())


def _num_scored(live: LiveRequest) -> int:
    """Prompt tokens whose logprobs are wanted."""
    return len(live.queued.prompt_token_ids) if live.queued.sampling.prompt_logprobs else 0


def _echo(live: LiveRequest) -> Echo | None:
    if live.echo_text is None:
        return None
    return Echo(
        text=live.echo_text,
        token_ids=live.queued.prompt_token_ids,
        logprobs=live.prompt_logprobs,
    )
