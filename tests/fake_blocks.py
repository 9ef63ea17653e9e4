"""The memory of a FakeWorker: what stands in its device and host blocks, and copies between them.

A swap runs beside the steps: nothing of it may be relied on before it is done. So a SWAP_OUT reads
its blocks at the end, a SWAP_IN spoils its targets at the begin, and what neither is done nor
forgotten is in nobody's way. The rules are those of the wire, checked here without the core's code.
"""

from collections.abc import Collection, Sequence

from scheduler_svc.core.ready import Operation
from scheduler_svc.core.types import OperationKind

# What no chain of tokens gives.
SPOILT = object()


class FakeBlocks:
    """Contents by block: for each of its tokens a value that stands for keys and values."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self._size = block_size
        self.device: list[list[object]] = [[SPOILT] * block_size for _ in range(num_blocks)]
        self.host: list[list[object]] = [[SPOILT] * block_size for _ in range(num_host_blocks)]
        self.in_flight: dict[int, Operation] = {}
        self.num_begun = {kind: 0 for kind in OperationKind}
        self._last_op_id = 0

    def begin(self, operations: Sequence[Operation], owned: Collection[int]) -> None:
        """Copies in the order of a plan. Rows have the device blocks `owned` in their tables."""
        for operation in operations:
            assert operation.op_id > self._last_op_id, "operations are out of order"
            self._last_op_id = operation.op_id
            self.num_begun[operation.kind] += 1
            sources, targets = operation.sources, operation.targets
            assert len(sources) == len(targets) > 0
            assert len(set(targets)) == len(targets), "a block is written twice"
            filling, leaving, host = self._busy()
            if operation.kind is not OperationKind.SWAP_OUT:
                assert not {*targets} & {*owned}, "a copy overwrites a block that is in use"
            if operation.kind is OperationKind.COPY:
                assert not filling & {*sources}
                assert not (filling | leaving) & {*targets}
                self._copy(operation)
                continue
            if operation.kind is OperationKind.SWAP_OUT:
                assert not filling & {*sources}, "a block is swapped out before it is filled"
                assert not host & {*targets}, "a host block is written while it is under a copy"
            else:
                assert not (filling | leaving) & {*targets}, "a block is filled under a copy"
                assert not host & {*sources}, "a host block is read before it is filled"
                for block in targets:
                    self.device[block] = [SPOILT] * self._size
            self.in_flight[operation.op_id] = operation

    def _busy(self) -> tuple[set[int], set[int], set[int]]:
        """Device blocks that are filled, device blocks that are read, host blocks of either."""
        filling, leaving, host = set[int](), set[int](), set[int]()
        for operation in self.in_flight.values():
            if operation.kind is OperationKind.SWAP_IN:
                filling.update(operation.targets)
                host.update(operation.sources)
            else:
                leaving.update(operation.sources)
                host.update(operation.targets)
        return filling, leaving, host

    def check_row(self, read: Collection[int], written: Collection[int]) -> None:
        """A row reads and writes blocks in this step."""
        filling, leaving, _ = self._busy()
        assert not filling & {*read, *written}, "a row uses a block that is being filled"
        assert not leaving & {*written}, "a row writes a block that is being copied"

    def end(self, count: int) -> tuple[int, ...]:
        """The first `count` operations in flight are done; returns their ids."""
        done = list(self.in_flight.values())[:count]
        for operation in done:
            self._copy(operation)
            del self.in_flight[operation.op_id]
        return tuple(operation.op_id for operation in done)

    def drop(self) -> None:
        """What is in flight stops half-way."""
        for operation in self.in_flight.values():
            for block in operation.targets if operation.kind is OperationKind.SWAP_OUT else ():
                self.host[block] = [SPOILT] * self._size
        self.in_flight.clear()

    def _copy(self, operation: Operation) -> None:
        source = self.host if operation.kind is OperationKind.SWAP_IN else self.device
        target = self.host if operation.kind is OperationKind.SWAP_OUT else self.device
        contents = [list(source[block]) for block in operation.sources]
        for block, content in zip(operation.targets, contents, strict=True):
            target[block] = content
