"""The waiting queue: requests by rank, lowest first."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from scheduler_svc.core.request import Rank, Request


class WaitingQueue:
    """Sorted by (priority, sequence). A preempted or recovered request returns to its old place."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._requests: dict[Rank, Request] = {}
        self._num_by_gateway: dict[str, int] = {}
        self._longest_by_gateway: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Request]:
        """In order. The queue must not change while it is walked."""
        return (self._requests[rank] for rank in self._ranks)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.rank) is request

    @property
    def longest_by_gateway(self) -> Mapping[str, int]:
        """For each gateway with requests here, a bound on their length, prompt and output."""
        return self._longest_by_gateway

    def add(self, request: Request) -> None:
        """Puts a request at the place of its rank."""
        assert request.rank not in self._requests, "a request waits twice"
        insort(self._ranks, request.rank)
        self._requests[request.rank] = request
        gateway_id = request.gateway_id
        self._num_by_gateway[gateway_id] = self._num_by_gateway.get(gateway_id, 0) + 1
        longest = self._longest_by_gateway.get(gateway_id, 0)
        self._longest_by_gateway[gateway_id] = max(longest, request.max_total_tokens)

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        assert self._requests.pop(request.rank) is request
        del self._ranks[bisect_left(self._ranks, request.rank)]
        num_left = self._num_by_gateway.pop(request.gateway_id) - 1
        if num_left:
            self._num_by_gateway[request.gateway_id] = num_left
        else:
            del self._longest_by_gateway[request.gateway_id]
