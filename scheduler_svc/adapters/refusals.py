"""Workers that refuse this term in favour of a later one, and when they are believed.

Whether there has been a later term is for the lease's own counter in Redis to say, which the leader
asks at each renewal. Redis may have lost it, with its last writes: then the leader that was, or the
next one, has an epoch that some workers refuse for ever, and the term has to end, so that the next
one has a higher epoch. A worker that lies says just the same, so its word is worth little:

- it costs that worker its session and its life, and counts once repeated MIN_REFUSALS times without
  a Hello between, when the lease has been asked meanwhile;
- claims end a term MAX_ENDED times in ENDED_PERIOD_NS at most, in one process, unless all workers
  that there are refuse: then nothing runs that could lose by it;
- epochs are milliseconds of Redis' clock when they begin, so a later term's can be as far above
  this one's as this one has lasted: a claim beyond that and MAX_EPOCHS_AHEAD is never believed.
"""

from collections import deque
from collections.abc import Sequence

from scheduler_svc.adapters.worker_life import LinkError, ProtocolError

MIN_REFUSALS = 4
MAX_ENDED = 4
ENDED_PERIOD_NS = 600_000_000_000
MAX_EPOCHS_AHEAD = 86_400_000


class EpochTooLowError(Exception):
    """Workers have seen a leader of a higher epoch, or so they say."""

    def __init__(self, highest_epoch: int) -> None:
        super().__init__(f"workers know epoch {highest_epoch}")
        self.highest_epoch = highest_epoch


class RefusedError(LinkError):
    """The worker claims that there has been a later term."""


class Refusals:
    """Those of one worker in a row, of a term of that epoch."""

    def __init__(self, epoch: int, term_began_ns: int) -> None:
        self.epoch = epoch
        self._term_began_ns = term_began_ns
        self._num_refusals = 0
        self._highest_epoch = 0

    def refused(self, highest_epoch: int, now_ns: int) -> LinkError:
        """It knows of this epoch, it says. Returns what its session ends by."""
        lasted_ms = (now_ns - self._term_began_ns) // 1_000_000
        if not self.epoch < highest_epoch <= self.epoch + lasted_ms + MAX_EPOCHS_AHEAD:
            return ProtocolError("it refuses in favour of no term that can have been")
        self._num_refusals += 1
        self._highest_epoch = highest_epoch
        return RefusedError("it refuses in favour of a later term")

    def accepted(self) -> None:
        """It has said Hello."""
        self._num_refusals = 0

    @property
    def claimed_epoch(self) -> int:
        """The epoch that it claims, once it has refused often enough; 0 before."""
        return self._highest_epoch if self._num_refusals >= MIN_REFUSALS else 0


class Credit:
    """How often terms may still end by claims; one for all terms of a process."""

    def __init__(self) -> None:
        self._ended_ns: deque[int] = deque(maxlen=MAX_ENDED)

    def take(self, now_ns: int) -> bool:
        """Whether a term may end now; if so that counts."""
        if len(self._ended_ns) == MAX_ENDED and now_ns - self._ended_ns[0] < ENDED_PERIOD_NS:
            return False
        self._ended_ns.append(now_ns)
        return True


def check(claimed: Sequence[int], credit: Credit, now_ns: int) -> None:
    """Raises EpochTooLowError if a term has to end by what its workers claim; 0 is no claim."""
    highest = max(claimed, default=0)
    if highest and (min(claimed) > 0 or credit.take(now_ns)):
        raise EpochTooLowError(highest)
