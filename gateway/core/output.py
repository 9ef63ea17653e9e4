"""Tokens of one request to the text the client sees: detokenizing, stop strings, hidden tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.core.detokenizer import Detokenizer
from gateway.core.stopping import StopMatcher
from gateway.core.types import FinishReason, Terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of output. The last one, and only it, has an end."""

    text: str
    token_ids: Sequence[int]
    end: Terminal | None = None


class OutputAssembler:
    """Stop tokens end a request and have no text. Stop strings count after min_tokens only."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str],
        stop_token_ids: Sequence[int],
        min_tokens: int,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._hidden = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self.num_tokens = 0

    def push(self, tokens: Sequence[int], end: Terminal | None) -> Chunk:
        """The next chunk. Its end is STOP where a stop string is complete, else `end`."""
        pieces = []
        for i, token in enumerate(tokens):
            self.num_tokens += 1
            if token in self._hidden:
                continue
            text = self._detokenizer.push(token)
            if not text:
                continue
            if self.num_tokens > self._min_tokens:
                text = self._matcher.push(text)
                pieces.append(text)
                if self._matcher.stopped:
                    return self._stopped(pieces, tokens[: i + 1])
            else:
                pieces.append(text)
        if end is not None:
            pieces.append(self._matcher.push(self._detokenizer.flush()))
            if self._matcher.stopped:
                return self._stopped(pieces, tokens)
            pieces.append(self._matcher.flush())
        return Chunk(text="".join(pieces), token_ids=tokens, end=end)

    def _stopped(self, pieces: list[str], tokens: Sequence[int]) -> Chunk:
        end = Terminal(reason=FinishReason.STOP)
        return Chunk(text="".join(pieces), token_ids=tokens, end=end)
