"""Host memory of one worker: its blocks, operations that are not done, requests swapped out.

A swapped request owns host blocks for all it has computed but the first blocks, which others shared
when it left and which it looks up again in the prefix cache. An operation in flight owns what it
alone still needs: a SWAP_OUT its device blocks, a SWAP_IN its host blocks, and what a request that
ended meanwhile has left to it. All that is free once the worker names the operation done.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scheduler_svc.core import plan_size
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.lifecycle import Move, RequestState
from scheduler_svc.core.request import Rank, Request
from scheduler_svc.core.types import BlockId, OperationKind


class HostPool:
    """Host blocks 0..num_blocks-1 of one worker: each free or owned once."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that requests or operations own."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` blocks; None, unchanged, if too few are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: Iterable[int]) -> None:
        """They are free."""
        self._free.extend(blocks)

    def check(self, owned: Iterable[Sequence[int]]) -> None:
        """Asserts that each block is free or owned once."""
        blocks = [*self._free, *(block for part in owned for block in part)]
        assert sorted(blocks) == list(range(self.num_blocks)), "a host block is lost or owned twice"


@dataclass(slots=True, kw_only=True, eq=False)
class Swapped:
    """A request that is out, or on its way back with a block table but no slot.

    `first` is the index of the first block that host_blocks hold; num_computed the tokens that are
    computed once its steps have returned.
    """

    request: Request
    num_computed: int
    first: int
    host_blocks: list[int]
    # The operation that it waits for.
    op_id: int | None = None
    # What had changed on its worker when it had no room to come back.
    had_no_room_at: int | None = None

    @property
    def is_out(self) -> bool:
        """It has not begun to come back."""
        return self.request.state is RequestState.SWAPPED


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    """An operation between device and host that is not done, and what it owns until then.

    `swapped` is the request that waits for it, None once that has ended or begins anew. targets are
    the device blocks that a SWAP_IN writes, `step` is that of the plan that asks for it.
    """

    kind: OperationKind
    step: int
    swapped: Swapped | None
    device_blocks: list[BlockId] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    targets: frozenset[BlockId] = frozenset()
    # It copies so many.
    num_blocks: int


class SwapSpace:
    """Mutable; part of a worker's state. `pool` holds the worker's device blocks."""

    def __init__(self, num_host_blocks: int, pool: BlockPool) -> None:
        self.host = HostPool(num_host_blocks)
        self.swapped: dict[Rank, Swapped] = {}
        self.transfers: dict[int, Transfer] = {}
        # Those of the swapped that hold a block table and wait for their slot.
        self.num_coming_back = 0
        # Blocks in transfers.
        self.num_moving = 0
        self._pool = pool

    def coming_back(self) -> list[Swapped]:
        """Those that hold a block table and wait for their slot."""
        if not self.num_coming_back:
            return []
        return [swapped for swapped in self.swapped.values() if not swapped.is_out]

    def of(self, request: Request) -> Swapped:
        """The entry of a swapped request."""
        return self.swapped[request.rank]

    def may_move(self, num_blocks: int) -> bool:
        """Whether the worker takes one more operation of so many blocks."""
        return self.num_moving + num_blocks <= plan_size.MAX_BLOCKS_MOVING

    def begin_out(
        self, swapped: Swapped, op_id: int, step: int, device_blocks: list[BlockId]
    ) -> None:
        """Device blocks, until now the request's, are copied to its host blocks."""
        self._pool.hold(device_blocks)
        self.num_moving += len(device_blocks)
        swapped.op_id = op_id
        swapped.request.move(Move.SWAP_OUT)
        self.swapped[swapped.request.rank] = swapped
        self.transfers[op_id] = Transfer(
            kind=OperationKind.SWAP_OUT,
            step=step,
            swapped=swapped,
            device_blocks=device_blocks,
            num_blocks=len(device_blocks),
        )

    def begin_in(self, swapped: Swapped, op_id: int, step: int, targets: Sequence[BlockId]) -> None:
        """The request's host blocks are copied to these blocks of its table."""
        swapped.op_id = op_id
        swapped.request.move(Move.SWAP_IN)
        self.num_coming_back += 1
        self.num_moving += len(targets)
        self.transfers[op_id] = Transfer(
            kind=OperationKind.SWAP_IN,
            step=step,
            swapped=swapped,
            host_blocks=swapped.host_blocks,
            targets=frozenset(targets),
            num_blocks=len(targets),
        )
        swapped.host_blocks = []

    def names_too_early(self, op_ids: Iterable[int], step: int) -> bool:
        """Whether one of these belongs to a plan after `step`, so that it can't be done yet."""
        transfers = (self.transfers.get(op_id) for op_id in op_ids)
        return any(transfer is not None and transfer.step > step for transfer in transfers)

    def done(self, op_id: int) -> Swapped | None:
        """The operation is over: frees what it owns; returns the request that waited for it."""
        transfer = self.transfers.pop(op_id, None)
        if transfer is None:
            return None
        self.num_moving -= transfer.num_blocks
        self._pool.let_go(transfer.device_blocks)
        self.host.release(transfer.host_blocks)
        if transfer.swapped is not None:
            transfer.swapped.op_id = None
        return transfer.swapped

    def leave(self, request: Request) -> Swapped:
        """The request is not swapped any more; its blocks are for the caller."""
        swapped = self.swapped.pop(request.rank)
        self.num_coming_back -= not swapped.is_out
        return swapped

    def forget(self, request: Request) -> None:
        """The request has ended or begins anew: frees its blocks, or leaves them to operations."""
        swapped = self.leave(request)
        mine, op_id = request.blocks, swapped.op_id
        request.blocks = []
        if op_id is None:
            self._pool.release(mine)
            self.host.release(swapped.host_blocks)
            return
        transfer = self.transfers[op_id]
        transfer.swapped = None
        if transfer.kind is OperationKind.SWAP_OUT:
            transfer.host_blocks = swapped.host_blocks
        else:
            transfer.device_blocks = [block for block in mine if block in transfer.targets]
            self._pool.release([block for block in mine if block not in transfer.targets])
            self._pool.hold(transfer.device_blocks)

    def check(self) -> None:
        """Asserts what must hold of host blocks, and of operations and their requests."""
        self.host.check(
            [
                *(swapped.host_blocks for swapped in self.swapped.values()),
                *(transfer.host_blocks for transfer in self.transfers.values()),
            ]
        )
        assert self.num_moving == sum(transfer.num_blocks for transfer in self.transfers.values())
        assert self.num_coming_back == sum(not s.is_out for s in self.swapped.values())
        waited_for = {s.op_id: s for s in self.swapped.values() if s.op_id is not None}
        assert waited_for == {i: t.swapped for i, t in self.transfers.items() if t.swapped}
        for rank, swapped in self.swapped.items():
            request = swapped.request
            assert request.rank == rank
            assert not (swapped.is_out and request.blocks), "a swapped request owns device blocks"
            if request.state is RequestState.SWAPPING_IN:
                assert request.num_in_flight == 0, "it comes back before its steps have returned"
