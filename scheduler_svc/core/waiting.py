"""The waiting queue: requests by rank, lowest first; with `fair` a lane for each tenant.

A preempted or recovered request returns to its old place in its lane.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heapreplace, merge

from scheduler_svc.core.request import Rank, Request
from scheduler_svc.core.tenants import Tenant, Tenants

# With `fair`: requests of one tenant that are looked at in one walk and not admitted.
MAX_LEFT = 16


class WaitingQueue:
    """Lanes are sorted by rank. Without tenants there is one lane for all."""

    def __init__(self, tenants: Tenants | None = None) -> None:
        self._tenants = tenants
        self._lanes: dict[Tenant | None, list[Rank]] = {}
        self._requests: dict[Rank, Request] = {}
        self._num_by_gateway: dict[str, int] = {}
        self._longest_by_gateway: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """By rank. The queue must not change while it is walked."""
        lanes = list(self._lanes.values())
        ranks = merge(*lanes) if len(lanes) > 1 else iter(lanes[0] if lanes else ())
        return map(self._requests.__getitem__, ranks)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.rank) is request

    @property
    def num_lanes(self) -> int:
        """With `fair` the tenants that wait."""
        return len(self._lanes)

    def heads(self) -> Iterator[Request]:
        """The first of each lane."""
        return (self._requests[lane[0]] for lane in self._lanes.values())

    def place(self, request: Request) -> int:
        """How many requests of its lane are before it."""
        key = None if self._tenants is None else request.tenant
        return bisect_left(self._lanes[key], request.rank)

    def in_turn(self, left: Mapping[Tenant, int]) -> Iterator[Request]:
        """In the order in which requests are to be admitted. `left` counts those that were not.

        With `fair` each time the next one of the tenant that has been served least by then, until
        MAX_LEFT of it are left. The queue must not change while it is walked, nor any counter but
        that of the tenant whose request was given last.
        """
        return iter(self) if self._tenants is None else self._in_turn_of_tenants(left)

    def _in_turn_of_tenants(self, left: Mapping[Tenant, int]) -> Iterator[Request]:
        turns = [(tenant.counter, lane[0], 0, tenant) for tenant, lane in self._by_tenant()]
        heapify(turns)
        while turns:
            _, rank, place, tenant = turns[0]
            yield self._requests[rank]
            lane, place = self._lanes[tenant], place + 1
            if place < len(lane) and left.get(tenant, 0) < MAX_LEFT:
                heapreplace(turns, (tenant.counter, lane[place], place, tenant))
            else:
                heappop(turns)

    def _by_tenant(self) -> Iterator[tuple[Tenant, list[Rank]]]:
        for tenant, lane in self._lanes.items():
            assert tenant is not None
            yield tenant, lane

    @property
    def longest_by_gateway(self) -> Mapping[str, int]:
        """For each gateway with requests here, a bound on their length, prompt and output."""
        return self._longest_by_gateway

    def add(self, request: Request) -> None:
        """Puts a request at the place of its rank."""
        rank, gateway_id = request.rank, request.gateway_id
        assert rank not in self._requests, "a request waits twice"
        key = None if self._tenants is None else request.tenant
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = []
            if self._tenants is not None:
                self._tenants.lift(request.tenant)
        if not lane or lane[-1] < rank:
            lane.append(rank)  # mostly: no search through a long lane
        else:
            insort(lane, rank)
        self._requests[rank] = request
        self._num_by_gateway[gateway_id] = self._num_by_gateway.get(gateway_id, 0) + 1
        longest = self._longest_by_gateway.get(gateway_id, 0)
        self._longest_by_gateway[gateway_id] = max(longest, request.max_total_tokens)

    def remove(self, *requests: Request) -> None:
        """Takes requests out."""
        for request in requests:
            rank, gateway_id = request.rank, request.gateway_id
            held = self._requests.pop(rank)
            assert held is request, "another request waits under its rank"
            key = None if self._tenants is None else request.tenant
            lane = self._lanes[key]
            del lane[0 if lane[0] == rank else bisect_left(lane, rank)]
            if not lane:
                del self._lanes[key]
            num_left = self._num_by_gateway[gateway_id] = self._num_by_gateway[gateway_id] - 1
            if not num_left:
                del self._num_by_gateway[gateway_id], self._longest_by_gateway[gateway_id]
