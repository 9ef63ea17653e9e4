"""The state of one request's stream: what has been given, and its one end.

Tokens come as (attempt, first position, tokens). Rules:
- a lower attempt than the current one is dropped, a higher one becomes current;
- positions below what is held are repeats: equal ones are dropped and counted, an unequal one is
  a divergence; a first position above what is held is a gap. Both ask for superseding: the
  request goes back into the queue with the tokens held as a fixed prefix and attempt + 1;
- the first end wins and nothing follows it;
- where logprobs are wanted they come with their tokens and are kept, and dropped, with them.
"""

from collections.abc import Sequence
from enum import Enum

from gateway.core.types import FinishReason, Terminal, TokenLogprob

MAX_SUPERSEDES = 3
# What the scheduler takes; a worker can name higher ones in its batches, and none can follow.
MAX_ATTEMPT = 2**31 - 1
_WORKER_ENDS = {
    FinishReason.ERROR: ("The request failed on its worker.", "request_failed"),
    FinishReason.CANCELLED: ("The request was cancelled.", "cancelled"),
}


class Fed(Enum):
    """What a piece of news did."""

    NOTHING = 0
    NEWS = 1
    DIVERGED = 2
    GAP = 3


class StreamState:
    """Mutable; owned by the engine's live request."""

    __slots__ = (
        "_num_taken",
        "attempt",
        "end",
        "logprobs",
        "num_repeated",
        "num_superseded",
        "tokens",
    )

    def __init__(self) -> None:
        self.attempt = 1
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.end: Terminal | None = None
        self.num_repeated = 0
        self.num_superseded = 0
        self._num_taken = 0

    @property
    def num_unread(self) -> int:
        """Tokens that the client's side has not taken."""
        return len(self.tokens) - self._num_taken

    @property
    def num_taken(self) -> int:
        """Tokens that the client's side has taken."""
        return self._num_taken

    def feed(
        self,
        attempt: int,
        first: int,
        tokens: Sequence[int],
        finish: int = 0,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> Fed:
        """Takes what a worker sent; see the module's rules. Logprobs: one per token, or none."""
        assert not logprobs or len(logprobs) == len(tokens)
        if self.end is not None or attempt < self.attempt:
            return Fed.NOTHING
        self.attempt = attempt
        held = len(self.tokens)
        # Nearly always zero, and to compare with members of an enum takes longer than the rest.
        orderly = finish != 0 and finish in (FinishReason.STOP, FinishReason.LENGTH)
        if finish and not orderly:
            # A failed row has no more tokens wherever it stood.
            reason = FinishReason(finish)
            message, code = _WORKER_ENDS.get(reason, ("", ""))
            return self.close(Terminal(reason=reason, message=message, code=code))
        if first > held:
            return Fed.GAP
        if first < held:
            overlap = min(held - first, len(tokens))
            if self.tokens[first : first + overlap] != list(tokens[:overlap]):
                return Fed.DIVERGED
            if orderly and first + len(tokens) < held:
                return Fed.DIVERGED
            self.num_repeated += overlap
            tokens = tokens[overlap:]
            logprobs = logprobs[overlap:]
        if tokens:
            self.num_superseded = 0
            self.tokens.extend(tokens)
            if logprobs:
                self.logprobs.extend(logprobs)
        if orderly:
            self.end = Terminal(reason=FinishReason(finish))
            return Fed.NEWS
        return Fed.NEWS if tokens else Fed.NOTHING

    def close(self, end: Terminal) -> Fed:
        """Ends the stream unless it has ended."""
        if self.end is not None:
            return Fed.NOTHING
        self.end = end
        return Fed.NEWS

    def supersede(self, *, counts: bool = True) -> bool:
        """Raises the attempt; False if that has happened MAX_SUPERSEDES times, or none is left.

        Those before the last token do not count: a stream that goes on may lose worker after worker
        and is bounded by its tokens. Nor does it count where nothing is known to have gone wrong
        with this request.
        """
        assert self.end is None
        if self.num_superseded >= MAX_SUPERSEDES or self.attempt >= MAX_ATTEMPT:
            return False
        self.num_superseded += counts
        self.attempt += 1
        return True

    def take(self) -> list[int]:
        """The tokens not taken before."""
        fresh = self.tokens[self._num_taken :]
        self._num_taken = len(self.tokens)
        return fresh
