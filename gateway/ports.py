"""What the engine asks of the world, and what the world tells the engine."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.core.detokenizer import Detokenizer
from gateway.core.prompt import Message
from gateway.core.types import Admission, Notice, QueuedRequest, RequestId, TokenBatch


@dataclass(frozen=True, slots=True)
class Sources:
    """Where time and chance come from: monotonic seconds, and so many random bytes."""

    clock_s: Callable[[], float] = time.monotonic
    random_bytes: Callable[[int], bytes] = secrets.token_bytes


class RequestQueue(Protocol):
    """The durable queue."""

    async def admit(self, requests: Sequence[QueuedRequest]) -> list[Admission]:
        """Adds all or none. Raises QueueFullError at the bound, UnavailableError without Redis."""

    async def supersede(self, old: Admission, request: QueuedRequest) -> Admission:
        """Replaces an entry by a later attempt. Never refused; raises UnavailableError."""

    async def standing(self, entry_ids: Sequence[str]) -> list[bool]:
        """Whether each of these entries is still there. Raises UnavailableError."""

    def cancel(self, request_id: RequestId) -> None:
        """Tells the scheduler, in the background and as soon as Redis answers."""

    @property
    def available(self) -> bool:
        """Redis answered last time."""


class WorkerLink(Protocol):
    """The token stream of one worker incarnation."""

    @property
    def connected(self) -> bool:
        """The stream is open."""

    def cancel(self, request_id: RequestId) -> None:
        """Ends a request's row, in the background."""


class Fleet(Protocol):
    """The workers that this gateway can be served by."""

    @property
    def usable(self) -> bool:
        """At least one has its stream open and is in the registry."""

    @property
    def max_model_len(self) -> int | None:
        """The longest context a worker offers; None while none is known."""

    def cancel(self, request_id: RequestId) -> None:
        """Ends a request's row on whichever worker has it, in the background."""


class EventSink(Protocol):
    """Takes news of requests; calls do not block."""

    def on_batch(self, batch: TokenBatch, link: WorkerLink, *, hold: bool = False) -> None:
        """Tokens have come. With `hold` the loop is behind: they may go out with later ones."""

    def on_gap(self, link: WorkerLink) -> None:
        """Tokens of this worker are lost."""

    def on_notice(self, notice: Notice) -> None:
        """A request has ended elsewhere."""


class TokenizerPort(Protocol):
    """Tokenizing, off the event loop."""

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """The tokens of a raw prompt, with the model's own opening token unless told otherwise."""

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Sequence[int]:
        """The tokens of a conversation put through the chat template."""

    async def decode_ids(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, all at once."""

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, special ones too; half a character may be among it."""

    def detokenizer(
        self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> Detokenizer:
        """A detokenizer for one run of tokens that follows the tokens `after`."""
