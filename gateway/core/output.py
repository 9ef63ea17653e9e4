"""Tokens of one request to the text the client sees: detokenizing, stop strings, hidden tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.core.detokenizer import Detokenizer
from gateway.core.stopping import StopMatcher
from gateway.core.types import FinishReason, Terminal, TokenLogprob


class Chunk(NamedTuple):
    """A piece of output. The last one, and only it, has an end.

    `logprobs` has one entry per token where they were asked for, and is empty elsewhere. A tuple:
    there is one for each token, and a frozen dataclass takes five times as long to make.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] = ()
    end: Terminal | None = None


class OutputAssembler:
    """Stop tokens end a request and have no text. Stop strings count after min_tokens only.

    With `include_stop` the stop string or the stop token's text ends the output. With `hidden` the
    client wants no output at all: tokens are taken and not shown.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str],
        stop_token_ids: Sequence[int],
        min_tokens: int,
        include_stop: bool = False,
        hidden: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include_stop=include_stop)
        self._matches = bool(stops)
        self._no_text = frozenset(() if include_stop else stop_token_ids)
        self._min_tokens = min_tokens
        self._hidden = hidden
        self.num_tokens = 0

    def push(
        self,
        tokens: Sequence[int],
        end: Terminal | None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> Chunk:
        """The next chunk. Its end is STOP where a stop string is complete, else `end`."""
        if self._hidden:
            return Chunk("", (), (), _without_output(end))
        if not self._matches:
            return Chunk(self._text(tokens, end), tokens, logprobs, end)
        pieces = []
        for i, token in enumerate(tokens):
            self.num_tokens += 1
            if token in self._no_text:
                continue
            text = self._detokenizer.push(token)
            if not text:
                continue
            if self.num_tokens > self._min_tokens:
                text = self._matcher.push(text)
                pieces.append(text)
                if self._matcher.stopped:
                    return self._stopped(pieces, tokens[: i + 1], logprobs[: i + 1])
            else:
                pieces.append(text)
        if end is not None:
            pieces.append(self._matcher.push(self._detokenizer.flush()))
            if self._matcher.stopped:
                return self._stopped(pieces, tokens, logprobs)
            pieces.append(self._matcher.flush())
        return Chunk(text="".join(pieces), token_ids=tokens, logprobs=logprobs, end=end)

    def _text(self, tokens: Sequence[int], end: Terminal | None) -> str:
        """Of tokens in which nothing is looked for."""
        self.num_tokens += len(tokens)
        text = ""
        for token in tokens:
            if token not in self._no_text:
                text += self._detokenizer.push(token)
        return text if end is None else text + self._detokenizer.flush()

    def _stopped(
        self, pieces: list[str], tokens: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> Chunk:
        end = Terminal(reason=FinishReason.STOP)
        return Chunk(text="".join(pieces), token_ids=tokens, logprobs=logprobs, end=end)


def _without_output(end: Terminal | None) -> Terminal | None:
    """Of an answer that holds its prompt alone: its length was what was asked for."""
    if end is not None and end.reason is FinishReason.STOP:
        return Terminal(reason=FinishReason.LENGTH)
    return end
