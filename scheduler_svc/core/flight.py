"""Steps that have not returned, with their rows as columns of equal length."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from scheduler_svc.core.request import Request
from scheduler_svc.core.rows import Column, Rows
from scheduler_svc.core.tenants import Tenant


class Batch:
    """The rows of a step, in the order of the plan. Steps with the same rows share one.

    num_tokens holds the tokens of each row as a column by slot, 0 where there is no row.
    """

    def __init__(self, slots: Column, num_tokens: Column, rows: Rows) -> None:
        self.slots = slots
        self.num_tokens = num_tokens
        self.slot_ids: tuple[int, ...] = tuple(slots.tolist())
        # An array: mostly nobody looks at more than a few of them.
        self.requests: Sequence[Request] = rows.requests[slots]  # type: ignore[assignment]
        self.token_ids: list[array[int]] = rows.token_ids[slots].tolist()

    @cached_property
    def num_by_tenant(self) -> Counter[Tenant]:
        """Rows of each tenant."""
        return Counter(request.tenant for request in self.requests)


# A row that is more than one decode after another, a chunk or the first to sample: its tokens, and
# whether it samples. A plain tuple, since each admission makes one and a class costs a call.
Special = tuple[int, bool]
DECODE: Special = 1, True


@dataclass(slots=True, kw_only=True)
class StepInFlight:
    """A plan that has not returned.

    Each row computes one token and samples the next, but for those in `special`, by row number.
    `gone` are rows whose request has left its slot since. expected_us is what it should take on
    the worker, planned_ns when it was planned; follows: right after another step.
    """

    step: int
    num_tokens: int
    batch: Batch
    special: dict[int, Special]
    planned_ns: int = 0
    expected_us: float = 0.0
    follows: bool = False
    gone: set[int] = field(default_factory=set)

    def leave(self, slot: int, request: Request) -> bool:
        """The request leaves the slot; returns whether this step has a row of it."""
        try:
            row = self.batch.slot_ids.index(slot)
        except ValueError:
            return False
        if self.batch.requests[row] is not request:
            return False
        self.gone.add(row)
        return True
