"""Workers that say what can't be, over real gRPC: it costs them their stream or their life."""

from collections.abc import Callable

import pytest
from quire.v1 import worker_pb2
from structlog.testing import capture_logs

from scheduler_svc.adapters.refusals import MIN_REFUSALS
from scheduler_svc.core.events import (
    StepCompleted,
    WorkerJoined,
    WorkerLost,
)
from tests.builders import expected_output
from tests.integration.scheduler.fake_worker_server import FakeWorkerServer
from tests.integration.scheduler.harness import eventually, tokens_of
from tests.integration.scheduler.rig import EPOCH, Rig, request


def _skip_a_step(worker: FakeWorkerServer) -> None:
    result = worker_pb2.StepResult(epoch=EPOCH, step=worker.last_step + 9)
    worker.say(worker_pb2.SessionResponse(result=result))


def _uneven_columns(worker: FakeWorkerServer) -> None:
    result = worker_pb2.StepResult(epoch=EPOCH, step=worker.last_step + 1, slots=[1, 2])
    worker.say(worker_pb2.SessionResponse(result=result))


def _second_hello(worker: FakeWorkerServer) -> None:
    worker.say(worker_pb2.SessionResponse(hello=worker._hello()))


@pytest.mark.parametrize("misbehave", [_skip_a_step, _uneven_columns, _second_hello])
async def test_a_worker_that_breaks_the_protocol_loses_its_stream_only(
    worker: FakeWorkerServer, misbehave: Callable[[FakeWorkerServer], None]
) -> None:
    worker.step_s = 0.002
    async with Rig(worker).running() as rig:
        await rig.saw(WorkerJoined)
        arrival = request(max_tokens=60)
        rig.feed(arrival)
        await rig.saw(StepCompleted, 5)
        misbehave(worker)
        await eventually(lambda: rig.finishes)
    assert worker.num_sessions == 2
    assert rig.of(WorkerLost) == []
    assert tokens_of(worker.emissions, arrival.request_id) == expected_output(arrival)[0]


def _one_column_longer(result: worker_pb2.StepResult) -> None:
    result.slots.append(1)


def _a_row_that_was_not_planned(result: worker_pb2.StepResult) -> None:
    result.slots.append(31)
    result.token_ids.append(1)


@pytest.mark.parametrize("garble", [_one_column_longer, _a_row_that_was_not_planned])
async def test_a_worker_whose_result_cannot_be_is_lost_and_dialled_anew(
    worker: FakeWorkerServer, garble: Callable[[worker_pb2.StepResult], None]
) -> None:
    """Sent again it is no better: a resumed session would go round for ever."""
    worker.step_s = 0.002
    async with Rig(worker).running() as rig:
        await rig.saw(WorkerJoined)
        arrival = request(max_tokens=60)
        rig.feed(arrival)
        await rig.saw(StepCompleted, 5)
        worker.garble_next = garble
        await rig.saw(WorkerLost)
        rig.link._kick.set()  # does not wait for the pause
        await rig.saw(WorkerJoined, 2)
        await eventually(lambda: rig.finishes)
    assert tokens_of(worker.emissions, arrival.request_id) == expected_output(arrival)[0]


async def test_the_log_tells_which_worker_was_given_up_and_why(worker: FakeWorkerServer) -> None:
    with capture_logs() as said:
        async with Rig(worker).running() as rig:
            await rig.saw(WorkerJoined)
            rig.feed(request(max_tokens=300))
            await rig.saw(StepCompleted, 5)
            worker.garble_next = _a_row_that_was_not_planned
            await rig.saw(WorkerLost)
    [lost] = [line for line in said if line["event"] == "worker_lost"]
    assert lost["worker"] == "w1"
    assert lost["reason"] == "the core gave it up: a row samples that was not planned"


async def test_a_refusal_in_favour_of_no_later_term_ends_no_term(worker: FakeWorkerServer) -> None:
    worker.refuses_below = EPOCH + 1
    worker.refuses_with = EPOCH
    async with Rig(worker).running() as rig:
        await eventually(lambda: len(worker.opens) >= 2)
        assert rig.events == []


async def test_a_claim_of_a_later_term_is_passed_on_once_it_has_been_repeated(
    worker: FakeWorkerServer,
) -> None:
    """And costs no other worker anything: the link goes on."""
    worker.refuses_below = EPOCH + 3
    async with Rig(worker).running() as rig:
        await eventually(lambda: rig.link.claimed_epoch)
        assert (rig.link.claimed_epoch, len(worker.opens)) == (EPOCH + 3, MIN_REFUSALS)
        worker.refuses_below = 0
        await rig.saw(WorkerJoined)
        assert rig.link.claimed_epoch == 0


async def test_a_claim_in_the_middle_of_a_life_ends_that_life(worker: FakeWorkerServer) -> None:
    async with Rig(worker).running() as rig:
        await rig.saw(WorkerJoined)
        arrival = request(max_tokens=300)
        rig.feed(arrival)
        await rig.saw(StepCompleted, 5)
        refused = worker_pb2.Refused(highest_epoch=EPOCH + 1)
        worker.say(worker_pb2.SessionResponse(refused=refused))
        await rig.saw(WorkerLost)
        rig.link._kick.set()  # does not wait for the pause
        await rig.saw(WorkerJoined, 2)
        await eventually(lambda: rig.finishes)
    assert tokens_of(worker.emissions, arrival.request_id) == expected_output(arrival)[0]
