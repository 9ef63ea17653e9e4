"""A worker's life: what is unreturned, what a resumed session sends again."""

import pytest
from quire.v1 import worker_pb2

from scheduler_svc.adapters.loss_rules import STUCK_NS, WorkerHealth
from scheduler_svc.adapters.worker_life import CannotResumeError, LinkError, WorkerLife
from scheduler_svc.core.events import StepCompleted
from scheduler_svc.core.ready import StepPlan
from scheduler_svc.core.types import CostProfile, WorkerCapacity, WorkerId
from scheduler_svc.ports import Hello, StepReport

WORKER, INCARNATION = WorkerId("w"), 7


def make_life() -> WorkerLife:
    return WorkerLife(
        worker_id=WORKER,
        epoch=1,
        incarnation=INCARNATION,
        health=WorkerHealth(cost=CostProfile(), grace_ns=10**9, now_ns=0),
        gateway_ids=frozenset(),
    )


def plan(step: int, num_steps: int = 1) -> StepPlan:
    return StepPlan(
        worker_id=WORKER,
        epoch=1,
        step=step,
        based_on_step=0,
        reset=step == 1,
        releases=(),
        admits=(),
        changed=(),
        growth=(),
        digest=0,
        num_scheduled_tokens=1,
        num_rows=1,
        num_chunks=0,
        num_steps=num_steps,
    )


def hello(last_applied_step: int, first_result_step: int = 1) -> Hello:
    return Hello(
        min_schema_revision=1,
        max_schema_revision=1,
        worker_id=WORKER,
        incarnation=INCARNATION,
        model_digest="",
        capacity=WorkerCapacity(
            num_slots=1, num_blocks=1, block_size=1, max_num_batched_tokens=1, max_model_len=1
        ),
        cost=CostProfile(),
        last_applied_step=last_applied_step,
        first_result_step=first_result_step,
    )


def result(life: WorkerLife, step: int, now_ns: int = 0, *, epoch: int = 1) -> bool:
    """Whether the core is told of it."""
    report = StepReport(
        epoch=epoch, step=step, slots=(), token_ids=(), finished=(), num_wasted_rows=0, faults=(),
        idle_us=40, step_us=10, total_us=90,
    )  # fmt: skip
    event = life.event(report, now_ns)
    if event is None:
        return False
    assert isinstance(event, StepCompleted)
    assert (event.step, event.step_us, event.total_us, event.idle_us) == (step, 10, 90, 40)
    life.returned(now_ns)
    return True


def sent_again(life: WorkerLife, last_applied_step: int) -> list[tuple[int, int]]:
    """First step and number of steps of each plan."""
    messages = [
        worker_pb2.SessionRequest.FromString(raw) for raw in life.resume(hello(last_applied_step))
    ]
    return [(message.plan.step, message.plan.num_steps) for message in messages]


def test_a_plan_of_several_steps_is_kept_until_the_last_result() -> None:
    life = make_life()
    for step, num_steps in ((1, 1), (2, 3), (5, 2)):
        assert life.plan(plan(step, num_steps), 0) is not None
    assert all(result(life, step) for step in (1, 2, 3))
    assert life.last_result_step == 3
    assert not result(life, 3), "a repeat"
    with pytest.raises(LinkError):
        result(life, 5)
    assert all(result(life, step) for step in (4, 5, 6))
    with pytest.raises(LinkError):
        result(life, 7)


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_result_of_another_epoch_is_none_of_this_life(epoch: int) -> None:
    """Even if its step is the next one: what it says is of another leader's requests."""
    life = make_life()
    life.plan(plan(1), 0)
    assert not result(life, 1, epoch=epoch)
    assert life.last_result_step == 0
    assert result(life, 1)


@pytest.mark.parametrize(
    ("num_results", "last_applied", "again"),
    [
        (1, 1, [(2, 3), (5, 2)]),
        (1, 4, [(5, 2)]),
        (3, 4, [(5, 2)]),
        (3, 6, []),
        (4, 4, [(5, 2)]),
        (5, 6, []),
    ],
)
def test_a_resumed_session_sends_the_plans_that_did_not_arrive(
    num_results: int, last_applied: int, again: list[tuple[int, int]]
) -> None:
    """A worker has all steps of a plan or none, also where some of them have returned."""
    life = make_life()
    for step, num_steps in ((1, 1), (2, 3), (5, 2)):
        life.plan(plan(step, num_steps), 0)
    for step in range(1, num_results + 1):
        assert result(life, step)
    assert sent_again(life, last_applied) == again


def test_a_worker_that_has_forgotten_a_part_of_a_plan_cannot_resume() -> None:
    life = make_life()
    for step, num_steps in ((1, 1), (2, 3)):
        life.plan(plan(step, num_steps), 0)
    for step in (1, 2, 3):
        assert result(life, step)
    with pytest.raises(CannotResumeError):
        life.resume(hello(2))


def test_a_worker_that_has_more_than_it_was_sent_cannot_resume() -> None:
    life = make_life()
    assert life.resume(hello(9)) == [], "steps of an older life"
    for step, num_steps in ((1, 1), (2, 3)):
        life.plan(plan(step, num_steps), 0)
    assert life.resume(hello(4)) == []
    with pytest.raises(CannotResumeError):
        life.resume(hello(5))


def test_a_second_breach_without_a_result_between_is_one_too_many() -> None:
    life = make_life()
    life.plan(plan(1), 0)
    assert not life.breached()
    assert result(life, 1)
    assert not life.breached()
    assert life.breached()


def test_each_step_of_a_plan_has_its_own_time_to_end() -> None:
    life, now_ns = make_life(), 0

    def is_stuck_after(duration_ns: int) -> bool:
        """Heartbeats come all the time."""
        nonlocal now_ns
        end_ns = now_ns + duration_ns
        while now_ns < end_ns:
            now_ns += 100_000_000
            life.health.heard(now_ns)
            verdict = life.health.check(now_ns)
            if verdict is not None and verdict.stuck:
                return True
        return False

    life.plan(plan(1, 1), 0)
    assert result(life, 1)
    life.plan(plan(2, 3), 0)
    for step in (2, 3):
        assert not is_stuck_after(STUCK_NS - 1)
        assert result(life, step, now_ns)
    assert is_stuck_after(10 * STUCK_NS)
