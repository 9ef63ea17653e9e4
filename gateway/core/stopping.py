"""Finding stop strings in text that arrives in pieces.

Rule: the output is cut where the stop string begins that is complete first (of those complete at
the same character, the longest). Text is held back only while it may be the beginning of one: as
long as the longest match in progress, never longer. With `include_stop` the cut is behind the stop
string, and nothing need be held back.
"""

from collections.abc import Sequence


class StopMatcher:
    """One Knuth-Morris-Pratt automaton per stop string: constant amortized work per character."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        assert all(stops), "validation refuses empty stop strings"
        # Longest first: of two that end together the longer begins earlier.
        self._stops = sorted(stops, key=len, reverse=True)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may be given now; sets `stopped` when a stop string is complete."""
        assert not self.stopped, "no text after a stop string"
        if not self._stops:
            return text
        buffer = self._held + text
        for i in range(len(self._held), len(buffer)):
            length = self._step(buffer[i])
            if length:
                self.stopped = True
                self._held = ""
                return buffer[: i + 1 - (0 if self._include_stop else length)]
        keep = len(buffer) if self._include_stop else len(buffer) - max(self._matched)
        self._held = buffer[keep:]
        return buffer[:keep]

    def flush(self) -> str:
        """The text held back, after the last piece."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> int:
        """Advances by one character; the length of the stop string now complete, or 0."""
        complete = 0
        for k, stop in enumerate(self._stops):
            matched = self._matched[k]
            while matched and stop[matched] != char:
                matched = self._failures[k][matched - 1]
            if stop[matched] == char:
                matched += 1
            self._matched[k] = matched
            if matched == len(stop):
                # States are not used after a stop, so this one may stand at its end.
                complete = max(complete, matched)
        return complete


def _failure_table(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper border."""
    table = [0] * len(stop)
    border = 0
    for i in range(1, len(stop)):
        while border and stop[i] != stop[border]:
            border = table[border - 1]
        if stop[i] == stop[border]:
            border += 1
        table[i] = border
    return table
