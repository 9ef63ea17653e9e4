"""The waiting queue: requests by rank, lowest first."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler_svc.core.request import Rank, Request


class WaitingQueue:
    """Sorted by (priority, sequence). A preempted or recovered request returns to its old place."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._requests: dict[Rank, Request] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Request]:
        """In order. The queue must not change while it is walked."""
        return (self._requests[rank] for rank in self._ranks)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.rank) is request

    def add(self, request: Request) -> None:
        """Puts a request at the place of its rank."""
        assert request.rank not in self._requests, "a request waits twice"
        insort(self._ranks, request.rank)
        self._requests[request.rank] = request

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        assert self._requests.pop(request.rank) is request
        del self._ranks[bisect_left(self._ranks, request.rank)]
