"""Copies of blocks that plans ask for: what may be asked, and which blocks are under a copy.

Pure. Rows and COPY run in the order of the plans. SWAP_OUT and SWAP_IN may run beside them, in
order among themselves, until they are said to be done. So nothing that runs in order

    reads or writes   a target block of a SWAP_IN that is not done
    writes            a source block of a SWAP_OUT that is not done

while host blocks, which only swaps touch, need no such rule. A plan that breaks it is refused
whole, like one that names blocks that are not there.

Bound: MAX_PAIRS_IN_FLIGHT pairs of blocks in operations that are not done, a plan's own included; a
plan beyond it is refused.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gpu_worker.ports import Operation, OperationKind, ScheduledRow
from gpu_worker.slot_table import InvalidPlanError, ReplicaLimits

MAX_PAIRS_IN_FLIGHT = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyBlocks:
    """Device blocks under a swap: `filling` from the host, `leaving` to it."""

    filling: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)

    def add(self, operation: Operation) -> None:
        """The operation has begun."""
        if operation.kind == OperationKind.SWAP_IN:
            self.filling.update(operation.target_blocks)
        elif operation.kind == OperationKind.SWAP_OUT:
            self.leaving.update(operation.source_blocks)


class InFlight:
    """Operations that have begun and are not done. Only `commit` and `done` change it."""

    def __init__(self) -> None:
        self._last_op_id = 0
        self._operations: dict[int, Operation] = {}

    def __len__(self) -> int:
        return len(self._operations)

    def stage(
        self, operations: Sequence[Operation], limits: ReplicaLimits, *, new_epoch: bool
    ) -> BusyBlocks | None:
        """The blocks under a swap once these have begun; None if no operation is in flight then.

        Raises InvalidPlanError. Changes nothing.
        """
        if not operations and not self._operations:
            return None
        busy = BusyBlocks()
        num_pairs = 0
        for operation in self._operations.values():
            busy.add(operation)
            num_pairs += len(operation.target_blocks)
        last_op_id = 0 if new_epoch else self._last_op_id
        for operation in operations:
            if operation.op_id <= last_op_id:
                raise InvalidPlanError(f"operation {operation.op_id} does not follow {last_op_id}")
            last_op_id = operation.op_id
            _check(operation, limits, busy)
            busy.add(operation)
            num_pairs += len(operation.target_blocks)
        if num_pairs > MAX_PAIRS_IN_FLIGHT:
            raise InvalidPlanError(f"{num_pairs} blocks in flight, {MAX_PAIRS_IN_FLIGHT} allowed")
        return busy

    def commit(self, operations: Sequence[Operation], *, new_epoch: bool) -> None:
        """These begin. With a new epoch nothing may be in flight, and ids begin anew."""
        if new_epoch:
            assert not self._operations, "operations of an older epoch are in flight"
            self._last_op_id = 0
        if operations:
            self._last_op_id = operations[-1].op_id
            self._operations.update((operation.op_id, operation) for operation in operations)

    def done(self, op_ids: Collection[int]) -> None:
        """These have ended; each was in flight."""
        for op_id in op_ids:
            del self._operations[op_id]


def _check(operation: Operation, limits: ReplicaLimits, busy: BusyBlocks) -> None:
    """Raises InvalidPlanError."""
    sources, targets = operation.source_blocks, operation.target_blocks
    device, host = limits.num_blocks, limits.num_host_blocks
    busy_block: int | None = None
    match operation.kind:
        case OperationKind.COPY:
            source_bound = target_bound = device
            busy_block = next((b for b in sources if b in busy.filling), None)
            if busy_block is None:
                unwritable = busy.filling | busy.leaving
                busy_block = next((b for b in targets if b in unwritable), None)
        case OperationKind.SWAP_OUT:
            source_bound, target_bound = device, host
        case OperationKind.SWAP_IN:
            source_bound, target_bound = host, device
        case _:
            raise InvalidPlanError(f"operation {operation.op_id} has unknown kind {operation.kind}")
    checks = (
        (operation.group == 0, f"group {operation.group}"),
        (len(sources) > 0, "no blocks"),
        (len(sources) == len(targets), "columns differ in length"),
        (all(0 <= block < source_bound for block in sources), "a source block is out of range"),
        (all(0 <= block < target_bound for block in targets), "a target block is out of range"),
        (len(set(targets)) == len(targets), "a target block stands twice"),
        (busy_block is None, f"block {busy_block} is under a swap"),
    )
    for good, what in checks:
        if not good:
            raise InvalidPlanError(f"operation {operation.op_id}: {what}")


def check_rows(
    busy: BusyBlocks,
    rows: Sequence[ScheduledRow],
    growth: Mapping[int, Sequence[int]],
    block_size: int,
) -> None:
    """Raises InvalidPlanError if a row reads or writes what it may not. `growth` is by slot."""
    if not busy.filling and not busy.leaving:
        return
    for row in rows:
        end = row.start + len(row.token_ids)
        table = [*row.block_ids, *growth.get(row.slot, ())][: -(-end // block_size)]
        for index, block in enumerate(table):
            written = index >= row.start // block_size
            if block in busy.filling or (written and block in busy.leaving):
                raise InvalidPlanError(f"slot {row.slot}: block {block} is under a swap")
