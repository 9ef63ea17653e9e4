"""Outboxes of tokens, one for each gateway that waits, and the streams that empty them.

Lives on the event loop's thread. A batch goes into the outbox of its reply_to whether or not the
gateway is connected; a stream sends from the outbox by sequence, so a slow gateway holds up nobody.

Bounds: `max_batches` and MAX_OUTBOX_LOGPROBS per outbox, the oldest dropped first; a stream that
has not sent what is dropped ends, and the next subscription is told of the gap. MAX_OUTBOXES
outboxes, the one unused for longest dropped first; GONE_S without a stream drops an outbox.

Invariant: batch i of an outbox has the sequence `first_sequence + i`.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from structlog.typing import FilteringBoundLogger

from gpu_worker.messages import MAX_BATCH_LOGPROBS, Subscribe, TokenBatch

GONE_S = 60.0
# 64 MiB: a logprob with its token id takes eight bytes. The newest batch stays whatever it holds.
MAX_OUTBOX_LOGPROBS = 8 * MAX_BATCH_LOGPROBS
MAX_OUTBOXES = 1024
_BATCHES_A_TURN = 64


class StreamEndedError(Exception):
    """The worker ends the stream; the gateway may subscribe again."""


class AllSentError(StreamEndedError):
    """The worker leaves, and the stream has sent all there was."""


class HubFullError(Exception):
    """MAX_OUTBOXES gateways are connected."""


@dataclass(slots=True, eq=False)
class _Outbox:
    batches: deque[TokenBatch] = field(default_factory=deque)
    first_sequence: int = 1
    num_logprobs: int = 0
    stream: "TokenStream | None" = None
    unused_since_s: float = 0.0

    @property
    def last_sequence(self) -> int:
        return self.first_sequence + len(self.batches) - 1

    def add(self, batch: TokenBatch) -> None:
        self.batches.append(batch)
        if batch.logprobs:
            self.num_logprobs += _num_logprobs(batch)

    def drop_through(self, sequence: int) -> int:
        """Returns how many batches that were."""
        before = len(self.batches)
        while self.batches and self.first_sequence <= sequence:
            batch = self.batches.popleft()
            self.first_sequence += 1
            if batch.logprobs:
                self.num_logprobs -= _num_logprobs(batch)
        return before - len(self.batches)

    def make_room(self, max_batches: int) -> int:
        """Drops the oldest batches while there are too many; returns how many that were."""
        num_dropped = 0
        while len(self.batches) > max_batches or (
            self.num_logprobs > MAX_OUTBOX_LOGPROBS and len(self.batches) > 1
        ):
            num_dropped += self.drop_through(self.first_sequence)
        return num_dropped


def _num_logprobs(batch: TokenBatch) -> int:
    return sum(entry.num_values for entry in batch.logprobs)


class TokenStream:
    """A gateway's open stream. `gap` is for its first message."""

    def __init__(self, gateway_id: str, outbox: _Outbox, last_sent: int, *, gap: bool) -> None:
        self.gateway_id = gateway_id
        self.gap = gap
        self.wake = asyncio.Event()
        self.wake.set()
        self.outbox = outbox
        self._last_sent = last_sent
        self._end_reason: str | None = None
        self._is_last = False

    def end_when_sent(self) -> None:
        """The writer will raise AllSentError once nothing is left to send."""
        self._is_last = True
        self.wake.set()

    def end(self, reason: str) -> None:
        """The writer will raise StreamEndedError."""
        self._end_reason = self._end_reason or reason
        self.wake.set()

    def next_batches(self) -> list[tuple[int, TokenBatch]]:
        """Batches with their sequence, a bounded number; they count as sent."""
        if self._end_reason is not None:
            raise StreamEndedError(self._end_reason)
        outbox = self.outbox
        if self._last_sent + 1 < outbox.first_sequence:
            raise StreamEndedError("the stream is too slow: batches were dropped unsent")
        skip = self._last_sent + 1 - outbox.first_sequence
        new = itertools.islice(outbox.batches, skip, skip + _BATCHES_A_TURN)
        batches = list(enumerate(new, self._last_sent + 1))
        self._last_sent += len(batches)
        if self._is_last and not batches:
            raise AllSentError("the worker leaves")
        return batches

    def acknowledge(self, sequence: int) -> None:
        """Batches up to `sequence` need not be kept; what was not sent is not acknowledged."""
        self.outbox.drop_through(min(sequence, self._last_sent))


class TokenHub:
    """All outboxes."""

    def __init__(
        self,
        *,
        max_batches: int,
        clock_s: Callable[[], float],
        on_subscriptions: Callable[[Sequence[str]], None],
        log: FilteringBoundLogger,
        max_outboxes: int = MAX_OUTBOXES,
    ) -> None:
        self._max_batches = max_batches
        self._max_outboxes = max_outboxes
        self._clock_s = clock_s
        self._on_subscriptions = on_subscriptions
        self._log = log
        self._outboxes: dict[bytes, _Outbox] = {}
        self.num_dropped_batches = 0

    @property
    def num_batches(self) -> int:
        """Batches kept in all outboxes."""
        return sum(len(outbox.batches) for outbox in self._outboxes.values())

    @property
    def num_outboxes(self) -> int:
        """Outboxes kept, with and without a stream."""
        return len(self._outboxes)

    @property
    def num_unacknowledged(self) -> int:
        """Batches that a connected gateway has not acknowledged."""
        return sum(len(box.batches) for box in self._outboxes.values() if box.stream is not None)

    def publish(self, batches: Sequence[tuple[bytes, TokenBatch]]) -> None:
        """One step's batches, in the order in which each gateway is to get its own."""
        for reply_to, batch in batches:
            outbox = self._outboxes.get(reply_to) or self._new_outbox(reply_to)
            if outbox is None:
                self.num_dropped_batches += 1
                continue
            outbox.add(batch)
            self.num_dropped_batches += outbox.make_room(self._max_batches)
            if outbox.stream is not None:
                outbox.stream.wake.set()

    def subscribe(self, subscribe: Subscribe) -> TokenStream:
        """Opens the outbox; an older stream of the same gateway ends. Raises HubFullError."""
        outbox = self._outboxes.get(subscribe.reply_to) or self._new_outbox(subscribe.reply_to)
        if outbox is None:
            raise HubFullError
        last = subscribe.last_sequence
        if last > outbox.last_sequence:
            # The gateway knew an outbox that has been dropped since: go on after its sequence.
            gap = True
            outbox.first_sequence = last + 1
        else:
            gap = last + 1 < outbox.first_sequence
            outbox.drop_through(last)
        if outbox.stream is not None:
            outbox.stream.end("another stream of this gateway has opened")
        stream = TokenStream(subscribe.gateway_id, outbox, outbox.first_sequence - 1, gap=gap)
        outbox.stream = stream
        self._log.info("gateway subscribed", gateway=stream.gateway_id, last=last, gap=gap)
        self._tell_subscriptions()
        return stream

    def unsubscribe(self, stream: TokenStream) -> None:
        """The stream has ended; its outbox stays for GONE_S."""
        outbox = stream.outbox
        if outbox.stream is stream:
            outbox.stream = None
            outbox.unused_since_s = self._clock_s()
            self._log.info("gateway unsubscribed", gateway=stream.gateway_id)
            self._tell_subscriptions()

    def close(self) -> None:
        """The worker leaves and will publish no more: open streams end in order."""
        for outbox in self._outboxes.values():
            if outbox.stream is not None:
                outbox.stream.end_when_sent()

    def sweep(self) -> None:
        """Drops outboxes of gateways that have been gone for GONE_S. Call every few seconds."""
        oldest = self._clock_s() - GONE_S
        gone = [
            reply_to
            for reply_to, outbox in self._outboxes.items()
            if outbox.stream is None and outbox.unused_since_s <= oldest
        ]
        for reply_to in gone:
            del self._outboxes[reply_to]

    def _new_outbox(self, reply_to: bytes) -> _Outbox | None:
        if len(self._outboxes) >= self._max_outboxes:
            unused = [(box.unused_since_s, key) for key, box in self._outboxes.items()
                      if box.stream is None]  # fmt: skip
            if not unused:
                return None
            del self._outboxes[min(unused)[1]]
        outbox = _Outbox(unused_since_s=self._clock_s())
        self._outboxes[reply_to] = outbox
        return outbox

    def _tell_subscriptions(self) -> None:
        streams = (box.stream for box in self._outboxes.values())
        self._on_subscriptions(sorted({s.gateway_id for s in streams if s is not None}))
