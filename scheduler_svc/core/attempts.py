"""Attempts of requests that the core does not hold, so that no two sessions emit under one.

A request that ended after the core had moved it may come again: its last worker died with the end,
and its gateway, which has seen none of the moves, asks for an attempt that has been used. The same
holds for what snapshots show of requests that have not arrived yet.
"""

from collections import OrderedDict

from scheduler_svc.core.types import RequestId

MAX_REMEMBERED = 65_536


class AttemptMemory:
    """The highest attempt by request, for the MAX_REMEMBERED noted last; older ones are forgotten.

    A request that comes again after that may share an attempt with what a worker still delivers.
    Its gateway drops equal repeats and answers a gap by another attempt: no token is lost by it.
    """

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        # The first entry of a plain dict is found behind all that have been taken out before it.
        self._attempts: OrderedDict[RequestId, int] = OrderedDict()

    def note(self, request_id: RequestId, attempt: int) -> None:
        """Tokens of the request may be delivered under `attempt` and lower ones."""
        # Taken out first: the order is that of the last note.
        attempt = max(attempt, self._attempts.pop(request_id, 0))
        self._attempts[request_id] = attempt
        if len(self._attempts) > self._max_remembered:
            self._attempts.popitem(last=False)

    def take(self, request_id: RequestId) -> int:
        """The highest attempt noted, 0 if none; forgets it, as the request is held from now on."""
        return self._attempts.pop(request_id, 0)
