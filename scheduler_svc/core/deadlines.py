"""Requests by deadline, earliest first."""

from heapq import heapify, heappop, heappush

from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.request import Request

_MIN_PRUNED = 1024


class Deadlines:
    """A heap. Entries of ended requests leave at the head, or all when the heap has doubled."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._num_added = 0
        self._prune_at = _MIN_PRUNED
        # Before that none is due, so that nobody has to ask.
        self.none_before_ns: float = float("inf")

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watches a request; one without a deadline is left alone."""
        if request.deadline_ns is None:
            return
        if len(self._heap) >= self._prune_at:
            self._heap = [e for e in self._heap if e[2].state is not RequestState.FINISHED]
            heapify(self._heap)
            self._prune_at = max(_MIN_PRUNED, 2 * len(self._heap))
        self._num_added += 1
        heappush(self._heap, (request.deadline_ns, self._num_added, request))
        self.none_before_ns = self._heap[0][0]

    def next_ns(self) -> int | None:
        """The earliest deadline of a request that has not ended."""
        while self._heap and self._heap[0][2].state is RequestState.FINISHED:
            self._pop()
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ns: int) -> Request | None:
        """A request whose deadline has come, or None."""
        if self.none_before_ns > now_ns:
            return None  # mostly: no look at who has ended
        next_ns = self.next_ns()
        if next_ns is None or next_ns > now_ns:
            return None
        return self._pop()

    def _pop(self) -> Request:
        request = heappop(self._heap)[2]
        self.none_before_ns = self._heap[0][0] if self._heap else float("inf")
        return request
