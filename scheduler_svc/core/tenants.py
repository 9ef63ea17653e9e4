"""Service by tenant: a virtual token counter each, for the `fair` policy.

A tenant's counter is the tokens computed for it, divided by its weight. Requests of the tenant
with the lowest counter go first. What is charged:

- at a request's first admission its known tokens that no prefix hit gave: a hit costs nothing;
- each output token when it is confirmed;
- nothing twice: neither after a preemption, nor after a lost worker, nor when the gateway asks
  anew while the request is held.

An idle time earns nothing: a tenant that begins to wait is lifted to the service that the least
served waiting tenant had at the last admission (`floor`, which only rises).

The bound that follows is in docs/scheduling.md.
"""

from collections import OrderedDict
from dataclasses import dataclass

MAX_IDLE = 4096


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant. `num_held` counts its requests that have not ended."""

    name: str
    weight: float = 1.0
    counter: float = 0.0
    num_held: int = 0

    def charge(self, num_tokens: int) -> None:
        """Tokens computed for the tenant."""
        self.counter += num_tokens / self.weight


class Tenants:
    """All tenants with requests, and of those without the last MAX_IDLE with more than the floor.

    A forgotten tenant comes back with the service of the floor, which is all that the others know
    of it anyway, unless it was pushed out at the bound: then it has got the difference for free.
    """

    def __init__(self, *, max_idle: int = MAX_IDLE) -> None:
        self._max_idle = max_idle
        self._tenants: dict[str, Tenant] = {}
        self._idle: OrderedDict[str, Tenant] = OrderedDict()
        self._floor = 0.0

    def __len__(self) -> int:
        return len(self._tenants) + len(self._idle)

    def arrived(self, name: str, weight: float) -> Tenant:
        """The tenant of one more request; the weight said last counts."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = (
                self._idle.pop(name) if name in self._idle else Tenant(name)
            )
        tenant.weight = weight
        tenant.num_held += 1
        return tenant

    def ended(self, tenant: Tenant) -> None:
        """One request less."""
        tenant.num_held -= 1
        if tenant.num_held:
            return
        del self._tenants[tenant.name]
        if tenant.counter > self._floor:
            self._idle[tenant.name] = tenant
            if len(self._idle) > self._max_idle:
                self._idle.popitem(last=False)

    def lift(self, tenant: Tenant) -> None:
        """The tenant begins to wait."""
        tenant.counter = max(tenant.counter, self._floor)

    def raise_floor(self, counter: float) -> None:
        """A request is admitted while `counter` is the lowest of those that wait."""
        self._floor = max(self._floor, counter)
