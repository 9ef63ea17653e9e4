"""What administrators are answered."""

import pytest
from quire.v1 import common_pb2, scheduler_pb2

from scheduler_svc import admin_codec
from scheduler_svc.core.account import Account, Wait
from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.ready import CoreStats, CoreView, Explanation, WorkerView
from scheduler_svc.core.types import FinishReason, PrefixStop, RequestId, WorkerId

Answer = scheduler_pb2.ExplainResponse


def test_a_standby_has_an_empty_snapshot() -> None:
    response = admin_codec.encode_snapshot(leader=False, view=None, stats=None, addresses={})
    assert response == scheduler_pb2.SnapshotResponse()


def test_a_snapshot_shows_how_far_it_runs_ahead() -> None:
    worker = WorkerView(
        worker_id=WorkerId("w"),
        num_running=3,
        num_blocks_used=16,
        num_blocks=64,
        num_steps_in_flight=2,
        last_step=9,
        draining=True,
        max_steps_in_flight=4,
        round_trip_us=2500,
    )
    view = CoreView(epoch=7, num_waiting=5, num_running=3, backlog_tokens=99, workers=(worker,))
    response = admin_codec.encode_snapshot(
        leader=True, view=view, stats=CoreStats(), addresses={WorkerId("w"): "h:1"}
    )
    assert list(response.workers) == [
        scheduler_pb2.WorkerState(
            worker_id="w",
            address="h:1",
            num_requests_running=3,
            num_blocks_used=16,
            num_blocks=64,
            num_steps_in_flight=2,
            last_step=9,
            draining=True,
            max_steps_in_flight=4,
            round_trip_us=2500,
        )
    ]


def explanation(**fields: object) -> Explanation:
    values: dict[str, object] = {
        "request_id": RequestId(b"r" * 16),
        "state": RequestState.WAITING,
        "attempt": 2,
        "place": 0,
        "num_prompt_tokens": 5,
        "num_output_tokens": 6,
        "num_computed_tokens": 7,
        "num_cached_tokens": 4,
        "num_preemptions": 3,
        "arrived_ns": 1_000_000,
        "now_ns": 9_000_000,
        "account": Account(),
    }
    return Explanation(**(values | fields))  # type: ignore[arg-type]


def test_every_part_of_an_account_is_told() -> None:
    account = Account(
        waited=((Wait.TURN, 1_000_000), (Wait.HELD_BACK, 2_500_999)),
        preempted_ns=11_000,
        set_back_ns=12_000,
        num_moves=1,
        num_skips=8,
        prefix_stop=PrefixStop.EVICTED,
    )
    assert admin_codec.encode_explanation(explanation(account=account)) == Answer(
        state=Answer.STATE_WAITING,
        attempt=2,
        num_before=0,
        num_prompt_tokens=5,
        num_output_tokens=6,
        num_computed_tokens=7,
        num_cached_tokens=4,
        age_us=8000,
        waits=[
            Answer.Waited(reason=Answer.REASON_TURN, duration_us=1000),
            Answer.Waited(reason=Answer.REASON_HELD_BACK, duration_us=2500),
        ],
        num_preemptions=3,
        preempted_us=11,
        num_moves=1,
        set_back_us=12,
        num_skips=8,
        prefix_stop=Answer.PREFIX_STOP_EVICTED,
    )


def test_an_end_is_told_with_its_reason() -> None:
    ended = explanation(state=RequestState.FINISHED, place=None, finish=FinishReason.LENGTH)
    answer = admin_codec.encode_explanation(ended)
    assert answer.state == Answer.STATE_FINISHED
    assert answer.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert not answer.HasField("num_before")


def test_the_worker_is_named() -> None:
    runs = explanation(state=RequestState.RUNNING, worker_id=WorkerId("w7"))
    assert admin_codec.encode_explanation(runs).worker_id == "w7"


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("wait", Wait)
@pytest.mark.parametrize("stop", PrefixStop)
def test_every_value_has_a_name_on_the_wire(
    state: RequestState, wait: Wait, stop: PrefixStop
) -> None:
    account = Account(waited=((wait, 1000),), prefix_stop=stop)
    answer = admin_codec.encode_explanation(explanation(state=state, account=account))
    assert 0 not in (answer.state, answer.waits[0].reason, answer.prefix_stop)
