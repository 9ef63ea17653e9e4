"""Fakes at the gateway's ports, and a builder for an engine over them.

One token is one character: its id is the character's code.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from gateway.core.prompt import Message
from gateway.core.requests import RawRequest
from gateway.core.types import (
    Admission,
    FinishReason,
    LogprobRows,
    ModelInfo,
    Notice,
    QueuedRequest,
    RequestId,
    TokenBatch,
)
from gateway.engine import Engine, EngineConfig
from gateway.live import LiveRequest
from gateway.metrics import GatewayMetrics

MODEL = ModelInfo(name="tiny", digest="d", vocab_size=0x3000, max_model_len=512, eos_token_ids=(3,))


@dataclass
class FakeQueue:
    """Remembers; raises `error` while it is set."""

    error: Exception | None = None
    available: bool = True
    admitted: list[QueuedRequest] = field(default_factory=list)
    superseded: list[tuple[Admission, QueuedRequest]] = field(default_factory=list)
    cancelled: list[RequestId] = field(default_factory=list)
    arrivals: asyncio.Queue[QueuedRequest] = field(default_factory=asyncio.Queue)
    # Entries that are not there any more, and how often they were asked for.
    gone: set[str] = field(default_factory=set)
    asked: list[list[str]] = field(default_factory=list)

    async def admit(self, requests: Sequence[QueuedRequest]) -> list[Admission]:
        """Adds all or raises."""
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        admissions = []
        for request in requests:
            self.admitted.append(request)
            self.arrivals.put_nowait(request)
            admissions.append(Admission(entry_id=f"1-{len(self.admitted)}", deadline_ms=7))
        return admissions

    async def supersede(self, old: Admission, request: QueuedRequest) -> Admission:
        """Adds or raises."""
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.superseded.append((old, request))
        return Admission(entry_id=f"2-{len(self.superseded)}", deadline_ms=old.deadline_ms)

    async def standing(self, entry_ids: Sequence[str]) -> list[bool]:
        """All but those that are gone, or raises."""
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.asked.append(list(entry_ids))
        return [entry_id not in self.gone for entry_id in entry_ids]

    def cancel(self, request_id: RequestId) -> None:
        """Remembers."""
        self.cancelled.append(request_id)


@dataclass
class FakeFleet:
    """A fleet of any quality."""

    usable: bool = True
    max_model_len: int | None = None
    cancelled: list[RequestId] = field(default_factory=list)

    def cancel(self, request_id: RequestId) -> None:
        """Remembers."""
        self.cancelled.append(request_id)


@dataclass
class FakeLink:
    """A worker's stream."""

    connected: bool = True
    cancelled: list[RequestId] = field(default_factory=list)

    def cancel(self, request_id: RequestId) -> None:
        """Remembers."""
        self.cancelled.append(request_id)


class FakeDetokenizer:
    """Codes to characters; codes below 8 are special."""

    def __init__(self, skip_special_tokens: bool = True) -> None:
        self._skip = skip_special_tokens

    def push(self, token: int) -> str:
        """One character, for special tokens none or their name."""
        if token >= 8:
            return chr(token)
        return "" if self._skip else f"<{token}>"

    def flush(self) -> str:
        """Nothing is ever left."""
        return ""


class FakeTokenizer:
    """Characters to codes; `asked` is how the last conversation was to end."""

    asked: tuple[bool, bool] | None = None

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """One token per character; nothing is added."""
        return [ord(c) for c in text]

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Sequence[int]:
        """Contents one after the other."""
        self.asked = (add_generation_prompt, continue_final_message)
        return [ord(c) for m in messages for c in m.content]

    async def decode_ids(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The same as token by token."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join(detokenizer.push(i) for i in ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Of the character; 255 is half of one."""
        return b"\xc3" if token_id == 255 else FakeDetokenizer(False).push(token_id).encode()

    def detokenizer(
        self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> FakeDetokenizer:
        """One per run of tokens."""
        return FakeDetokenizer(skip_special_tokens)


def fake_rows(text: str, num_top: int, prompt_len: int = 0) -> LogprobRows:
    """-0.5 for each token, -0.5 - k for the k-th most likely one, which is the token's id + k.

    Rows of a prompt, whose tokens are not known here, have tops from the letter p on.
    """
    num_prompt_rows = max(prompt_len - 1, 0)
    ids = [*(ord("p") for _ in range(num_prompt_rows)), *map(ord, text)]
    return LogprobRows(
        num_prompt_rows=num_prompt_rows,
        logprobs=[-0.5] * len(ids),
        num_top=num_top,
        top_token_ids=[i + k for i in ids for k in range(num_top)],
        top_logprobs=[-0.5 - k for _ in ids for k in range(num_top)],
    )


@dataclass
class Bench:
    """An engine, what is behind it, and a worker to speak with."""

    engine: Engine
    queue: FakeQueue
    fleet: FakeFleet
    link: FakeLink
    registry: CollectorRegistry
    sequence: int = 0

    def say(
        self,
        request_id: RequestId,
        text: str = "",
        *,
        at: int = 0,
        attempt: int = 1,
        finish: FinishReason = FinishReason.UNSPECIFIED,
        link: FakeLink | None = None,
        cached: int = 0,
        num_top: int | None = None,
        prompt_len: int = 0,
        hold: bool = False,
    ) -> None:
        """The worker sends tokens of a request, with logprobs if num_top is given."""
        self.sequence += 1
        batch = TokenBatch(
            sequence=self.sequence,
            request_ids=request_id,
            attempts=[attempt],
            first_positions=[at],
            num_tokens=[len(text)],
            token_ids=[ord(c) for c in text],
            finish_reasons=[finish],
            num_cached_tokens=[cached],
            logprobs={} if num_top is None else {0: fake_rows(text, num_top, prompt_len)},
        )
        self.engine.on_batch(batch, link or self.link, hold=hold)

    def notify(
        self, request_id: RequestId, reason: FinishReason, message: str = "", attempt: int = 1
    ) -> None:
        """The scheduler sends a notice."""
        self.engine.on_notice(
            Notice(request_id=request_id, attempt=attempt, finish_reason=reason, message=message)
        )

    async def submit(self, text: str = "hi", **fields: object) -> LiveRequest:
        """A live request."""
        return await self.engine.submit(RawRequest(text=text, **fields))  # type: ignore[arg-type]

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value."""
        value = self.registry.get_sample_value(name, {"model_name": MODEL.name, **labels})
        assert value is not None, name
        return value


def make_bench(
    *,
    stall_s: float = 60.0,
    deadline_s: float = 600.0,
    buffer_tokens: int = 256,
    tokenizer: FakeTokenizer | None = None,
    queue: FakeQueue | None = None,
) -> Bench:
    """An engine that is not running its sweeper."""
    queue, fleet, registry = queue or FakeQueue(), FakeFleet(), CollectorRegistry()
    engine = Engine(
        model=MODEL,
        config=EngineConfig(
            default_deadline_s=deadline_s, stall_s=stall_s, stream_buffer_tokens=buffer_tokens
        ),
        queue=queue,
        fleet=fleet,
        tokenizer=tokenizer or FakeTokenizer(),
        metrics=GatewayMetrics(registry, MODEL.name),
    )
    return Bench(engine=engine, queue=queue, fleet=fleet, link=FakeLink(), registry=registry)


@contextlib.asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    """With its sweeper."""
    task = asyncio.get_running_loop().create_task(bench.engine.run())
    try:
        yield bench
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def drain_chunks(bench: Bench, live: LiveRequest) -> tuple[str, FinishReason, str]:
    """All that is left of a request: text, reason, code."""
    text = ""
    while True:
        chunk = await bench.engine.next_chunk(live)
        text += chunk.text
        if chunk.end is not None:
            return text, chunk.end.reason, chunk.end.code
