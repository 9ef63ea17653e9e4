"""Sessions: epochs, resync, and the bounds of what waits for a scheduler."""

import pytest

from gpu_worker import session
from gpu_worker.messages import (
    Cancels,
    Draining,
    FinishedRequest,
    FinishReason,
    Heartbeat,
    Open,
    SlotState,
    Snapshot,
    StepPlan,
    StepResult,
    Subscriptions,
)
from gpu_worker.session import (
    EpochRefusedError,
    Link,
    ProtocolError,
    SessionEndedError,
    Sessions,
    TooManyPlansError,
)
from servicekit.logs import get_logger
from tests.worker_builders import request_id

INCARNATION = 77


class FakePlans:
    """Takes plans as an executor would; the test ends steps."""

    def __init__(self) -> None:
        self.last_step = 0
        self.busy = False
        self.queued: list[StepPlan] = []
        self.state = Snapshot()

    def submit(self, plan: StepPlan) -> bool:
        if len(self.queued) + max(1, plan.num_steps) > 8:
            return False
        self.queued.extend(plan.single_steps())
        return True

    def discard_plans(self) -> None:
        self.queued.clear()

    def snapshot(self) -> Snapshot:
        return self.state


class Bench:
    def __init__(self) -> None:
        self.plans = FakePlans()
        self.num_dropped = 0
        self.sessions = Sessions(
            plans=self.plans,
            incarnation=INCARNATION,
            log=get_logger("test"),
            on_dropped_cancel=self._dropped,
        )

    def _dropped(self) -> None:
        self.num_dropped += 1

    def open(self, epoch: int = 1, last_result_step: int = 0, incarnation: int = 0) -> Link:
        return self.sessions.open(
            Open(
                epoch=epoch,
                min_schema_revision=1,
                max_schema_revision=3,
                last_result_step=last_result_step,
                incarnation=incarnation,
            )
        )

    def resync(self, last_result_step: int, epoch: int = 1) -> Link:
        return self.open(epoch, last_result_step, INCARNATION)

    def plan(self, link: Link, *steps: int, reset: bool = False, epoch: int = 1) -> None:
        for step in steps:
            plan = StepPlan(epoch=epoch, step=step, reset=reset or step == 1)
            self.sessions.receive(link, plan)

    def end_steps(self, count: int = 1) -> None:
        for _ in range(count):
            plan = self.plans.queued.pop(0)
            result = StepResult(epoch=plan.epoch, step=plan.step, digest=0)
            self.sessions.add_result(result)

    def results(self, link: Link) -> list[int]:
        messages = self.sessions.next_messages(link)
        return [message.step for message in messages if isinstance(message, StepResult)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_results_go_out_in_order_once(bench: Bench) -> None:
    link = bench.open()
    bench.plan(link, 1, 2, 3)
    assert bench.results(link) == []
    bench.end_steps(2)
    assert bench.results(link) == [1, 2]
    bench.end_steps()
    assert bench.results(link) == [3]
    assert bench.results(link) == []


def test_a_resync_sends_again_what_the_scheduler_lacks(bench: Bench) -> None:
    link = bench.open()
    bench.plan(link, 1, 2, 3, 4)
    bench.end_steps(3)
    assert bench.results(link) == [1, 2, 3]
    bench.sessions.close(link)
    bench.end_steps()
    again = bench.resync(1)
    assert (bench.sessions.last_applied_step, bench.sessions.first_result_step) == (4, 1)
    assert bench.results(again) == [2, 3, 4]
    bench.plan(again, 5)
    bench.end_steps()
    assert bench.results(again) == [5]


def test_a_scheduler_that_has_not_met_the_worker_gets_no_old_results(bench: Bench) -> None:
    link = bench.open()
    bench.plan(link, 1, 2)
    bench.end_steps(2)
    assert bench.results(bench.open(incarnation=0)) == []
    assert bench.results(bench.open(incarnation=INCARNATION + 1)) == []


def test_a_new_life_in_the_same_epoch_drops_what_the_old_one_left(bench: Bench) -> None:
    link = bench.open()
    bench.plan(link, 1, 2, 3)
    running = bench.plans.queued.pop(0)
    bench.plans.busy = True
    bench.sessions.close(link)
    link = bench.open()
    assert bench.plans.queued == []
    assert bench.sessions.next_messages(link) == [Heartbeat(last_step=0, busy=True)]
    bench.plans.last_step, bench.plans.busy = 1, False
    link.wake.clear()
    bench.sessions.add_result(StepResult(epoch=1, step=running.step, digest=0))
    assert link.wake.is_set()
    assert bench.sessions.next_messages(link) == [Heartbeat(last_step=1, busy=False)]
    bench.plan(link, 4, reset=True)
    bench.plan(link, 5)
    bench.end_steps(2)
    assert bench.results(link) == [4, 5]


def test_results_older_than_the_ring_are_gone_and_hello_says_so(bench: Bench) -> None:
    link = bench.open()
    for step in range(1, 101):
        bench.plan(link, step)
        bench.end_steps()
        bench.results(link)
    assert bench.sessions.first_result_step == 100 - session.RESULT_RING + 1
    assert bench.results(bench.resync(0)) == list(range(37, 101))
    assert bench.results(bench.resync(90)) == list(range(91, 101))


def test_a_scheduler_that_reads_nothing_loses_its_session(bench: Bench) -> None:
    link = bench.open()
    for step in range(1, session.RESULT_RING + 2):
        bench.plan(link, step)
        bench.end_steps()
    with pytest.raises(SessionEndedError):
        bench.sessions.next_messages(link)


def test_an_older_epoch_is_refused_and_named_the_highest(bench: Bench) -> None:
    bench.open(epoch=5)
    with pytest.raises(EpochRefusedError) as refused:
        bench.open(epoch=4)
    assert refused.value.highest_epoch == 5
    with pytest.raises(ProtocolError):
        bench.open(epoch=0)


def test_a_new_epoch_ends_the_old_session_and_drops_its_plans(bench: Bench) -> None:
    old = bench.open(epoch=1)
    bench.plan(old, 1, 2, 3)
    running = bench.plans.queued.pop(0)
    new = bench.open(epoch=2)
    assert bench.plans.queued == []
    with pytest.raises(SessionEndedError):
        bench.sessions.next_messages(old)
    with pytest.raises(SessionEndedError):
        bench.plan(old, 4)
    assert (bench.sessions.last_applied_step, bench.sessions.first_result_step) == (0, 1)
    bench.sessions.add_result(StepResult(epoch=1, step=running.step, digest=0))
    assert bench.results(new) == []
    bench.plan(new, 1, epoch=2)
    bench.end_steps()
    assert bench.results(new) == [1]
    bench.sessions.close(old)
    assert bench.sessions.is_open


def test_the_same_epoch_keeps_its_plans(bench: Bench) -> None:
    old = bench.open()
    bench.plan(old, 1, 2)
    new = bench.resync(0)
    assert len(bench.plans.queued) == 2
    with pytest.raises(SessionEndedError):
        bench.sessions.next_messages(old)
    bench.end_steps(2)
    assert bench.results(new) == [1, 2]


def test_a_new_epoch_drops_old_plans_also_where_it_knows_the_worker(bench: Bench) -> None:
    """Its scheduler never sent them, whatever it has heard of the worker."""
    bench.plan(bench.open(epoch=1), 1, 2, 3)
    link = bench.resync(0, epoch=2)
    assert bench.plans.queued == []
    assert (bench.sessions.last_applied_step, bench.sessions.first_result_step) == (0, 1)
    bench.plan(link, 1, epoch=2)
    bench.end_steps()
    assert bench.results(link) == [1]


@pytest.mark.parametrize("step", [0, 1, 2, 4, 9])
def test_a_step_out_of_order_breaks_the_protocol(bench: Bench, step: int) -> None:
    link = bench.open()
    bench.plan(link, 1, 2)
    with pytest.raises(ProtocolError):
        bench.sessions.receive(link, StepPlan(epoch=1, step=step))
    assert len(bench.plans.queued) == 2


def test_a_reset_may_leave_steps_out(bench: Bench) -> None:
    """A scheduler that has given its plans up goes on with its own numbers."""
    link = bench.open()
    bench.plan(link, 1, 2, 3)
    running = bench.plans.queued.pop(0)
    bench.plan(link, 8, reset=True)
    assert [plan.step for plan in bench.plans.queued] == [8]
    bench.sessions.add_result(StepResult(epoch=1, step=running.step, digest=0))
    assert bench.results(link) == []
    bench.end_steps()
    assert bench.results(link) == [8]


def test_a_result_of_a_later_step_than_the_next_is_dropped(bench: Bench) -> None:
    """A reset may also go back, while a step runs that no one waits for any more."""
    link = bench.open()
    bench.plan(link, 9, reset=True)
    running = bench.plans.queued.pop(0)
    bench.plan(link, 5, reset=True)
    bench.sessions.add_result(StepResult(epoch=1, step=running.step, digest=0))
    assert bench.results(link) == []
    bench.end_steps()
    assert bench.results(link) == [5]


def test_a_plan_of_several_steps_is_followed_by_the_step_after_them(bench: Bench) -> None:
    link = bench.open()
    bench.plan(link, 1)
    bench.sessions.receive(link, StepPlan(epoch=1, step=2, num_steps=3))
    assert bench.sessions.last_applied_step == 4
    with pytest.raises(ProtocolError):
        bench.plan(link, 3)
    bench.plan(link, 5)


def test_a_stream_that_breaks_within_a_plan_of_several_steps_resumes_there(bench: Bench) -> None:
    """The rest is computed meanwhile, and nothing is sent twice."""
    link = bench.open()
    bench.plan(link, 1)
    bench.sessions.receive(link, StepPlan(epoch=1, step=2, num_steps=3))
    bench.end_steps(2)
    assert bench.results(link) == [1, 2]
    bench.sessions.close(link)
    bench.end_steps(1)
    link = bench.resync(2)
    assert bench.sessions.last_applied_step == 4
    assert bench.results(link) == [3]
    bench.end_steps(1)
    assert bench.results(link) == [4]


def test_a_plan_of_another_epoch_breaks_the_protocol(bench: Bench) -> None:
    link = bench.open(epoch=2)
    with pytest.raises(ProtocolError):
        bench.plan(link, 1, epoch=1)


def test_more_plans_than_may_wait_break_the_protocol(bench: Bench) -> None:
    link = bench.open()
    bench.plan(link, *range(1, 9))
    with pytest.raises(TooManyPlansError):
        bench.plan(link, 9)
    assert bench.sessions.last_applied_step == 8


@pytest.mark.parametrize("revisions", [(0, 0), (2, 3)])
def test_a_scheduler_of_another_schema_is_turned_away(
    bench: Bench, revisions: tuple[int, int]
) -> None:
    low, high = revisions
    with pytest.raises(ProtocolError, match="revision"):
        bench.sessions.open(
            Open(
                epoch=1,
                min_schema_revision=low,
                max_schema_revision=high,
                last_result_step=0,
                incarnation=0,
            )
        )


def test_cancels_go_out_in_order_and_again_in_the_next_session(bench: Bench) -> None:
    bench.sessions.add_cancel(request_id(2))
    link = bench.open()
    bench.sessions.add_cancel(request_id(1))
    bench.sessions.add_cancel(request_id(1))
    expected = Cancels(request_ids=[request_id(2), request_id(1)])
    assert expected in bench.sessions.next_messages(link)
    assert bench.sessions.next_messages(link) == []
    bench.sessions.add_cancel(request_id(3))
    messages = bench.sessions.next_messages(bench.resync(0))
    assert Cancels(request_ids=[request_id(n) for n in (2, 1, 3)]) in messages


def test_many_cancels_go_out_in_several_messages(bench: Bench) -> None:
    for number in range(2500):
        bench.sessions.add_cancel(request_id(number))
    link, sent = bench.open(), 0
    while link.wake.is_set():
        link.wake.clear()
        for message in bench.sessions.next_messages(link):
            sent += len(message.request_ids) if isinstance(message, Cancels) else 0
    assert sent == 2500


def test_cancels_beyond_the_bound_are_dropped_and_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MAX_WAITING_CANCELS", 3)
    for number in range(5):
        bench.sessions.add_cancel(request_id(number))
    assert bench.num_dropped == 2


def test_heartbeats_subscriptions_and_draining_are_sent_when_due(bench: Bench) -> None:
    link = bench.open()
    assert bench.sessions.next_messages(link) == [Heartbeat(last_step=0, busy=False)]
    bench.plans.last_step, bench.plans.busy = 4, True
    bench.sessions.beat()
    bench.sessions.beat()
    bench.sessions.set_gateways(["a", "b"])
    bench.sessions.drain()
    messages = bench.sessions.next_messages(link)
    assert messages == [
        Subscriptions(gateway_ids=["a", "b"]),
        Draining(),
        Heartbeat(last_step=4, busy=True),
    ]
    assert Draining() in bench.sessions.next_messages(bench.open(epoch=2))


def test_a_snapshot_comes_in_chunks(bench: Bench) -> None:
    slots = [
        SlotState(
            slot=n, generation=1, request_id=request_id(n), attempt=1,
            num_computed_tokens=1, num_output_tokens=1,
        )
        for n in range(5000)
    ]  # fmt: skip
    finishes = [
        FinishedRequest(request_id=request_id(n), attempt=1, finish_reason=FinishReason.STOP)
        for n in range(9000)
    ]
    bench.plans.state = Snapshot(slots=slots, recent_finishes=finishes)
    bench.sessions.set_gateways(["a"])
    chunks = bench.sessions.snapshot_chunks()
    assert [chunk.last for chunk in chunks] == [False, False, True]
    assert [state for chunk in chunks for state in chunk.slots] == slots
    assert [finish for chunk in chunks for finish in chunk.recent_finishes] == finishes
    assert [name for chunk in chunks for name in chunk.gateway_ids] == ["a"]


def test_an_idle_worker_has_an_empty_snapshot(bench: Bench) -> None:
    assert bench.sessions.snapshot_chunks() == [Snapshot(last=True)]
