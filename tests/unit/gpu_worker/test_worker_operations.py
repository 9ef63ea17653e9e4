"""What copies of blocks a plan may ask for, and what is refused while swaps are under way."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from gpu_worker.messages import FaultCode, StepPlan
from gpu_worker.operations import MAX_PAIRS_IN_FLIGHT
from gpu_worker.ports import Operation, OperationKind, StepOutput
from gpu_worker.replica import AppliedPlan, Refusal, Replica
from gpu_worker.slot_table import ReplicaLimits
from tests.worker_builders import LIMITS, PlanScript, make_admit, make_operation

COPY, SWAP_OUT, SWAP_IN = OperationKind.COPY, OperationKind.SWAP_OUT, OperationKind.SWAP_IN
DEVICE, HOST = LIMITS.num_blocks, LIMITS.num_host_blocks


@pytest.fixture
def replica() -> Replica:
    """Nothing applied yet."""
    return Replica(LIMITS)


@pytest.fixture
def script() -> PlanScript:
    """The scheduler's side."""
    return PlanScript()


def applied(replica: Replica, plan: StepPlan) -> AppliedPlan:
    """The plan must be taken; its rows are booked with token 20."""
    result = replica.apply(plan)
    assert isinstance(result, AppliedPlan), result
    sampled = sum(row.samples for row in result.rows)
    replica.complete(StepOutput(token_ids=(20,) * sampled))
    return result


def refused(replica: Replica, plan: StepPlan) -> str:
    """The plan must break the protocol; why."""
    before = replica.num_operations
    result = replica.apply(plan)
    assert isinstance(result, Refusal), result
    assert result.code is FaultCode.INVALID_PLAN
    assert (replica.num_operations, replica.awaiting_reset) == (before, True)
    return result.message


def test_operations_come_back_in_their_order_and_are_in_flight_until_done(
    replica: Replica, script: PlanScript
) -> None:
    first = make_operation(4, SWAP_OUT, [(3, 1), (2, 0)])
    second = make_operation(9, COPY, [(3, 5)])
    plan = script.plan(operations=[first, second])
    assert list(applied(replica, plan).operations) == [first, second]
    assert replica.num_operations == 2
    replica.operations_done([9, 4])
    assert replica.num_operations == 0
    assert applied(replica, script.plan()).operations == ()


def test_every_block_of_both_sides_may_be_named(replica: Replica, script: PlanScript) -> None:
    operations = [
        make_operation(1, SWAP_OUT, [(DEVICE - 1, HOST - 1)]),
        make_operation(2, SWAP_IN, [(HOST - 1, 0)]),
        make_operation(3, COPY, [(DEVICE - 1, 1), (DEVICE - 1, 2)]),
    ]
    applied(replica, script.plan(operations=operations))


@pytest.mark.parametrize(
    ("operation", "why"),
    [
        (make_operation(0, COPY, [(1, 2)]), "operation 0 does not follow 0"),
        (make_operation(1, 0, [(1, 2)]), "unknown kind 0"),
        (make_operation(1, 4, [(1, 2)]), "unknown kind 4"),
        (make_operation(1, COPY, [(1, 2)], group=1), "group 1"),
        (make_operation(1, COPY, []), "no blocks"),
        (make_operation(1, COPY, [(1, 2)], target_blocks=(2, 3)), "columns differ"),
        (make_operation(1, COPY, [(1, 2), (3, 2)]), "a target block stands twice"),
        (make_operation(1, COPY, [(DEVICE, 2)]), "a source block is out of range"),
        (make_operation(1, COPY, [(1, DEVICE)]), "a target block is out of range"),
        (make_operation(1, SWAP_OUT, [(DEVICE, 2)]), "a source block is out of range"),
        (make_operation(1, SWAP_OUT, [(1, HOST)]), "a target block is out of range"),
        (make_operation(1, SWAP_IN, [(HOST, 2)]), "a source block is out of range"),
        (make_operation(1, SWAP_IN, [(1, DEVICE)]), "a target block is out of range"),
        (make_operation(1, SWAP_IN, [(-1, 2)]), "a source block is out of range"),
    ],
)
def test_an_operation_that_makes_no_sense_refuses_the_whole_plan(
    replica: Replica, script: PlanScript, operation: Operation, why: str
) -> None:
    good = make_operation(7, COPY, [(1, 2)])
    plan = script.plan(admits=[make_admit()], operations=[operation, good])
    assert why in refused(replica, plan)
    assert replica.num_live_rows == 0


def test_ids_rise_through_resets_and_begin_anew_in_a_new_epoch(replica: Replica) -> None:
    script = PlanScript(epoch=1)
    copy = [(1, 2)]
    applied(replica, script.plan(operations=[make_operation(5, COPY, copy)]))
    again = script.plan(operations=[make_operation(5, COPY, copy)])
    assert "operation 5 does not follow 5" in refused(replica, again)
    replica.operations_done([5])
    unordered = [make_operation(8, COPY, copy), make_operation(7, COPY, copy)]
    reset = script.plan(reset=True, operations=unordered)
    assert "operation 7 does not follow 8" in refused(replica, reset)
    applied(replica, script.plan(reset=True, operations=[make_operation(6, COPY, copy)]))
    replica.operations_done([6])
    newer = PlanScript(epoch=2)
    applied(replica, newer.plan(operations=[make_operation(1, COPY, copy)]))


def test_a_plan_whose_rows_are_refused_begins_no_operation(
    replica: Replica, script: PlanScript
) -> None:
    plan = script.plan(
        admits=[make_admit()], schedule=[(0, 6)], operations=[make_operation(1, COPY, [(1, 2)])]
    )
    assert "tokens up to 6 planned, 5 known" in refused(replica, plan)
    operations = [make_operation(1, COPY, [(1, 2)])]
    applied(replica, script.plan(reset=True, operations=operations))


def test_pairs_in_flight_are_bounded(script: PlanScript) -> None:
    replica = Replica(
        ReplicaLimits(
            num_slots=1,
            num_blocks=MAX_PAIRS_IN_FLIGHT + 1,
            block_size=4,
            vocab_size=100,
            max_model_len=40,
            max_num_batched_tokens=64,
        )
    )
    most = [(MAX_PAIRS_IN_FLIGHT, block) for block in range(MAX_PAIRS_IN_FLIGHT)]
    applied(replica, script.plan(operations=[make_operation(1, COPY, most)]))
    more = script.plan(operations=[make_operation(2, COPY, [(0, 1)])])
    assert "65537 blocks in flight, 65536 allowed" in refused(replica, more)
    replica.operations_done([1])
    applied(replica, script.plan(reset=True, operations=[make_operation(2, COPY, [(0, 1)])]))


# Slot 0 has blocks 0 and 1 for five tokens, and grows by block 8 below; one more token is known
# after its first step.
ROW = {"admits": [make_admit()], "schedule": [(0, 5)]}


@pytest.mark.parametrize(
    ("kind", "block", "step", "is_refused"),
    [
        (SWAP_IN, 0, 1, True),  # written
        (SWAP_IN, 0, 2, True),  # read
        (SWAP_IN, 1, 2, True),  # written
        (SWAP_IN, 2, 2, False),
        (SWAP_OUT, 0, 1, True),  # written
        (SWAP_OUT, 0, 2, False),  # read
        (SWAP_OUT, 1, 2, True),  # written
        (SWAP_OUT, 2, 2, False),
    ],
)
def test_rows_do_not_use_blocks_under_a_swap(
    replica: Replica,
    script: PlanScript,
    kind: OperationKind,
    block: int,
    step: int,
    is_refused: bool,
) -> None:
    """Whether the swap is in the same plan or in an earlier one without an acknowledgement."""
    pair = (3, block) if kind is SWAP_IN else (block, 3)
    swap = [make_operation(1, kind, [pair])]
    if step == 2:
        applied(replica, script.plan(**ROW))  # type: ignore[arg-type]
    rest = ROW if step == 1 else {"schedule": [(0, 1)]}
    plan = script.plan(operations=swap, **rest)  # type: ignore[arg-type]
    if is_refused:
        assert f"slot 0: block {block} is under a swap" in refused(replica, plan)
    else:
        applied(replica, plan)


@pytest.mark.parametrize(
    ("swap", "copy", "is_refused"),
    [
        ((SWAP_IN, (2, 5)), (5, 6), True),
        ((SWAP_IN, (2, 5)), (6, 5), True),
        ((SWAP_IN, (2, 5)), (2, 6), False),
        ((SWAP_OUT, (5, 2)), (5, 6), False),
        ((SWAP_OUT, (5, 2)), (6, 5), True),
        ((SWAP_OUT, (5, 2)), (6, 2), False),
    ],
)
@pytest.mark.parametrize("in_one_plan", [False, True])
def test_copies_do_not_use_blocks_under_a_swap_either(
    replica: Replica,
    script: PlanScript,
    swap: tuple[OperationKind, tuple[int, int]],
    copy: tuple[int, int],
    is_refused: bool,
    in_one_plan: bool,
) -> None:
    operations = [make_operation(1, swap[0], [swap[1]]), make_operation(2, COPY, [copy])]
    if not in_one_plan:
        applied(replica, script.plan(operations=operations[:1]))
        del operations[0]
    plan = script.plan(operations=operations)
    if is_refused:
        assert "operation 2: block 5 is under a swap" in refused(replica, plan)
    else:
        applied(replica, plan)


def test_swaps_follow_each_other_over_the_same_blocks(replica: Replica, script: PlanScript) -> None:
    """They keep their order among themselves."""
    operations = [
        make_operation(1, SWAP_OUT, [(5, 2)]),
        make_operation(2, SWAP_IN, [(2, 5)]),
        make_operation(3, SWAP_OUT, [(5, 2)]),
    ]
    applied(replica, script.plan(operations=operations))


def test_a_block_is_free_again_once_its_swap_is_done(replica: Replica, script: PlanScript) -> None:
    applied(replica, script.plan(operations=[make_operation(1, SWAP_IN, [(0, 1)])]))
    replica.operations_done([1])
    applied(replica, script.plan(**ROW))  # type: ignore[arg-type]


def test_a_row_does_not_grow_into_a_block_under_a_swap(
    replica: Replica, script: PlanScript
) -> None:
    swap = make_operation(1, SWAP_OUT, [(8, 0)])
    applied(replica, script.plan(admits=[make_admit()], schedule=[(0, 3)], operations=[swap]))
    grown = script.plan(schedule=[(0, 2)], growth=[(0, 8)])
    applied(replica, grown)  # positions 3 and 4: block 8 is there, and not yet used
    for _ in range(3):
        applied(replica, script.plan(schedule=[(0, 1)]))
    message = refused(replica, script.plan(schedule=[(0, 1)]))
    assert "slot 0: block 8 is under a swap" in message


def test_a_row_that_grows_and_writes_at_once_is_seen(replica: Replica, script: PlanScript) -> None:
    admit = make_admit(block_ids=(0,))
    swap = make_operation(1, SWAP_OUT, [(8, 0)])
    plan = script.plan(admits=[admit], growth=[(0, 8)], schedule=[(0, 5)], operations=[swap])
    assert "slot 0: block 8 is under a swap" in refused(replica, plan)


pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=2)
wishes = st.lists(st.tuples(st.sampled_from([COPY, SWAP_OUT, SWAP_IN]), pairs), max_size=3)
NARROW = ReplicaLimits(
    num_slots=1,
    num_blocks=4,
    block_size=2,
    vocab_size=100,
    max_model_len=40,
    max_num_batched_tokens=64,
    num_host_blocks=3,
)


def is_allowed(operations: Sequence[Operation], flying: list[Operation], row_step: int) -> bool:
    """The rules, use by use: `flying` holds what is not done; a step of the row comes last."""
    flying = list(flying)

    def usable(block: int, *, written: bool) -> bool:
        return not any(
            (other.kind == SWAP_IN and block in other.target_blocks)
            or (other.kind == SWAP_OUT and written and block in other.source_blocks)
            for other in flying
        )

    for operation in operations:
        sources = NARROW.num_host_blocks if operation.kind == SWAP_IN else NARROW.num_blocks
        targets = NARROW.num_host_blocks if operation.kind == SWAP_OUT else NARROW.num_blocks
        if max(operation.source_blocks) >= sources or max(operation.target_blocks) >= targets:
            return False
        if len(set(operation.target_blocks)) < len(operation.target_blocks):
            return False
        if operation.kind == COPY and not (
            all(usable(block, written=False) for block in operation.source_blocks)
            and all(usable(block, written=True) for block in operation.target_blocks)
        ):
            return False
        flying.append(operation)
    # Step 1 computes positions 0 to 2 of blocks 0 and 1, step 2 position 3.
    match row_step:
        case 1:
            return usable(0, written=True) and usable(1, written=True)
        case 2:
            return usable(0, written=False) and usable(1, written=True)
        case _:
            return True


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_what_is_refused_is_what_the_rules_forbid(data: st.DataObject) -> None:
    replica, script = Replica(NARROW), PlanScript()
    admit = make_admit(token_ids=(1, 2, 3, 4, 5), prompt_len=5, block_ids=(0, 1))
    applied(replica, script.plan(admits=[admit]))
    flying: list[Operation] = []
    op_id, row_step, num_tokens = 0, 0, 0
    for _ in range(data.draw(st.integers(1, 5))):
        operations = []
        for kind, columns in data.draw(wishes):
            op_id += 1
            operations.append(make_operation(op_id, kind, columns))
        scheduled = 0
        if row_step < 2 and data.draw(st.booleans()):
            row_step += 1
            scheduled = 3 if row_step == 1 else 1
        changes = [(0, scheduled)] if scheduled != num_tokens else []
        num_tokens = scheduled
        plan = script.plan(schedule=changes, operations=operations)
        allowed = is_allowed(operations, flying, row_step if scheduled else 0)
        if not allowed:
            refused(replica, plan)
            return
        assert list(applied(replica, plan).operations) == operations
        flying += operations
        done = [operation for operation in flying if data.draw(st.booleans())]
        flying = [operation for operation in flying if operation not in done]
        replica.operations_done([operation.op_id for operation in done])
        assert replica.num_operations == len(flying)
