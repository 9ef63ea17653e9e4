"""A live request: what the engine writes, and what its client's side reads."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from gateway.core.output import OutputAssembler
from gateway.core.stream import StreamState
from gateway.core.types import (
    Admission,
    FinishReason,
    LogprobRows,
    QueuedRequest,
    Terminal,
    TokenLogprob,
    Usage,
)
from gateway.ports import WorkerLink

# After the deadline, for the scheduler to say it first.
BACKSTOP_S = 10.0
# A running request has a token in each step; steps are shorter, but for those of long prompts.
RUNS_S = 5.0
DRAINING = Terminal(
    reason=FinishReason.UNAVAILABLE, message="The gateway is shutting down.", code="draining"
)
CLIENT_GONE = Terminal(
    reason=FinishReason.CANCELLED, message="The request was cancelled.", code="cancelled"
)
OVERDUE = Terminal(
    reason=FinishReason.DEADLINE,
    message="The request's deadline passed.",
    code="deadline_exceeded",
)
NO_LOGPROBS = Terminal(
    reason=FinishReason.ERROR,
    message="The worker sent no logprobs for this request.",
    code="logprobs_missing",
)


class Reader(Protocol):
    """A request's client's side; it reads what there is with `Engine.read`."""

    @property
    def waiting(self) -> bool:
        """It would read news at once: what it has not read does not wait for the client."""

    def on_news(self, live: "LiveRequest") -> None:
        """There is something to read. Must not raise, and may read within the call."""


class LiveRequest:
    """One accepted request. The engine writes its state, its client's side reads chunks.

    `echo_text` is the prompt as its client wants it back, None where it does not.
    """

    def __init__(
        self,
        queued: QueuedRequest,
        assembler: OutputAssembler,
        now_s: float,
        *,
        echo_text: str | None = None,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
    ) -> None:
        self.queued = queued
        self.request_id = queued.request_id
        # Of the first request of its call; clients end a call by that one's id.
        self.call_id = queued.request_id
        self.state = StreamState()
        self.assembler = assembler
        self.echo_text = echo_text
        self.skip_special_tokens = skip_special_tokens
        self.context = context
        self.wants_logprobs = queued.sampling.num_logprobs is not None
        self.admission: Admission | None = None
        self.link: WorkerLink | None = None
        self.heard_s = 0.0
        self.arrived_s = now_s
        self.backstop_s = now_s + queued.life_ms / 1000 + BACKSTOP_S
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.num_cached_tokens = 0
        self.superseding = False
        self._prompt_rows: LogprobRows | None = None
        self.has_news = False
        self.reader: Reader | None = None

    @property
    def public_id(self) -> str:
        """The id that clients see."""
        return self.request_id.hex()

    @property
    def usage(self) -> Usage:
        """As of the chunks read so far."""
        return Usage(
            prompt_tokens=len(self.queued.prompt_token_ids),
            completion_tokens=self.assembler.num_tokens,
            cached_tokens=self.num_cached_tokens,
        )

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Of the prompt's tokens from the second on; empty unless they were asked for."""
        return self.some_prompt_logprobs(1, len(self.queued.prompt_token_ids))

    def some_prompt_logprobs(self, start: int, stop: int) -> list[TokenLogprob]:
        """Of the tokens from `start` to before `stop`; the first of a prompt has none."""
        rows, prompt = self._prompt_rows, self.queued.prompt_token_ids
        if rows is None:
            return []
        return [rows.row(i - 1, prompt[i]) for i in range(max(start, 1), min(stop, len(prompt)))]

    def logprobs_of(
        self, tokens: Sequence[int], rows: LogprobRows | None
    ) -> Sequence[TokenLogprob] | None:
        """One for each token of a batch, None if some are missing. Keeps the prompt's."""
        if rows is None:
            return None
        num_before = rows.num_prompt_rows
        wanted = len(self.queued.prompt_token_ids) - 1
        if self.queued.sampling.prompt_logprobs and wanted and self._prompt_rows is None:
            if num_before != wanted:
                return None
            self._prompt_rows = rows
        return [rows.row(num_before + i, token) for i, token in enumerate(tokens)]

    def runs_at(self, now_s: float) -> bool:
        """Whether the worker that was last heard of it can be taken to run it still.

        One that has had nothing for RUNS_S may wait again, or another worker may have it.
        """
        return now_s - self.heard_s < RUNS_S

    @property
    def waiting(self) -> bool:
        """The client's side waits for news."""
        return self.reader is not None and self.reader.waiting

    def wake(self) -> None:
        """There is something to read."""
        self.has_news = True
        if self.reader is not None:
            self.reader.on_news(self)

    def take(self) -> tuple[Sequence[int], Sequence[TokenLogprob], Terminal | None]:
        """Tokens not taken before, their logprobs, and the end if there is one."""
        state = self.state
        self.has_news = state.end is not None
        at = state.num_taken
        tokens = state.take()
        return tokens, state.logprobs[at:] if self.wants_logprobs else (), state.end


class Waiter:
    """A Reader that waits for news of one request, once."""

    def __init__(self) -> None:
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting = True

    def on_news(self, live: LiveRequest) -> None:
        """Ends the wait."""
        if not self._news.done():
            self._news.set_result(None)

    async def wait(self, live: LiveRequest) -> None:
        """Until there is something to read. One reader at a time."""
        assert live.reader is None, "a request has one reader"
        live.reader = self
        try:
            await self._news
        finally:
            live.reader = None


def usage_of(lives: Sequence[LiveRequest]) -> Usage:
    """Of a whole call, as of the chunks read so far. The samples of a prompt share it.

    What the cache held of it is what the sample saw that had to compute most.
    """
    groups: dict[bytes, list[Usage]] = {}
    for live in lives:
        groups.setdefault(live.queued.sample_group or live.request_id, []).append(live.usage)
    return Usage(
        prompt_tokens=sum(group[0].prompt_tokens for group in groups.values()),
        completion_tokens=sum(u.completion_tokens for group in groups.values() for u in group),
        cached_tokens=sum(min(u.cached_tokens for u in group) for group in groups.values()),
    )


def slow_reader(num_unread: int) -> Terminal:
    """The end of a stream whose buffer is full."""
    return Terminal(
        reason=FinishReason.ERROR,
        message=f"The client read too slowly: {num_unread} tokens were waiting for it.",
        code="slow_reader",
    )


def stream_lost(why: str) -> Terminal:
    """The end of a stream that was superseded too often."""
    return Terminal(
        reason=FinishReason.ERROR,
        message=f"The stream could not be continued ({why}).",
        code="stream_lost",
    )
