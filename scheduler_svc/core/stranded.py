"""Requests that no worker can take: too long for all of them, or their gateway is read by none."""

from collections.abc import Mapping

from scheduler_svc.core.account import Wait
from scheduler_svc.core.request import Request
from scheduler_svc.core.types import WorkerId
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.core.worker_state import WorkerState

MESSAGE = "no worker could take the request in time"
_CHECK_NS = 100_000_000


class Stranded:
    """Looks for them now and then. `wait_ns` is how long one without a token may be."""

    def __init__(
        self, wait_ns: int, waiting: WaitingQueue, workers: Mapping[WorkerId, WorkerState]
    ) -> None:
        self._wait_ns = wait_ns
        self._waiting = waiting
        self._workers = workers
        self._check_at_ns = 0
        # Whether stranded_since_ns may be set in a waiting request.
        self._some = False

    def find(self, now_ns: int) -> list[Request]:
        """Requests without a token that no worker could take for worker_wait_ns."""
        if now_ns < self._check_at_ns or not len(self._waiting):
            return []
        self._check_at_ns = now_ns + _CHECK_NS
        longest = self._longest_by_gateway()
        needed = self._waiting.longest_by_gateway
        all_have = all(longest.get(g, 0) >= num_tokens for g, num_tokens in needed.items())
        if all_have and not self._some:
            return []
        self._some = not all_have
        stranded: list[Request] = []
        for request in self._waiting:
            if request.max_total_tokens <= longest.get(request.gateway_id, 0):
                if request.stranded_since_ns is not None:
                    request.waits.turn_to(Wait.TURN, now_ns)
                request.stranded_since_ns = None
            elif request.stranded_since_ns is None:
                request.stranded_since_ns = now_ns
                request.waits.turn_to(Wait.WORKER, now_ns)
            elif (
                request.num_output_tokens == 0
                and now_ns - request.stranded_since_ns >= self._wait_ns
            ):
                stranded.append(request)
        return stranded

    def _longest_by_gateway(self) -> dict[str, int]:
        """The longest request that some worker could run, for each gateway with workers."""
        longest: dict[str, int] = {}
        for worker in self._workers.values():
            for gateway_id in worker.gateway_ids:
                longest[gateway_id] = max(longest.get(gateway_id, 0), worker.max_request_tokens)
        return longest

    def wake_at_ns(self, now_ns: int) -> int | None:
        """When `find` has to look again."""
        if not len(self._waiting):
            return None
        return max(self._check_at_ns, now_ns + 1)
