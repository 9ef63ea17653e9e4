"""Results that can't be: their worker is given up, and nobody else is harmed."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler_svc.core.events import StepCompleted, StepFailed
from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.types import FinishReason, RequestId, Slot, WorkerId
from tests.builders import expected_output, make_core, make_request
from tests.cluster import Cluster

Lie = Callable[[StepCompleted], StepCompleted]


def lies() -> dict[str, Lie]:
    """By what is wrong with them; rows 0 and 1 are planned, and row 2 with a part of its prompt."""
    stop = FinishReason.STOP
    return {
        "a row that was not planned samples": lambda e: replace(
            e, slots=(*e.slots, Slot(5)), token_ids=(*e.token_ids, 1)
        ),
        "a row samples twice": lambda e: replace(
            e, slots=(*e.slots, e.slots[0]), token_ids=(*e.token_ids, 1)
        ),
        "a row twice in place of another": lambda e: replace(e, slots=(e.slots[0],) * 2),
        "a part of a prompt samples": lambda e: replace(
            e, slots=(*e.slots, Slot(2)), token_ids=(*e.token_ids, 1)
        ),
        "a row that was not planned ends": lambda e: replace(e, finished=((Slot(7), stop),)),
        "a row ends twice": lambda e: replace(
            e, finished=((e.slots[0], stop), (e.slots[0], FinishReason.LENGTH))
        ),
        "more rows are wasted than there are": lambda e: replace(e, num_wasted_rows=4),
    }


# Where it is not told in these words.
TOLD = {
    "a row that was not planned samples": "a row samples that was not planned",
    "a row twice in place of another": "a row samples twice",
    "a part of a prompt samples": "a row samples in the middle of its prompt",
    "a row that was not planned ends": "a row ends that was not planned",
    "more rows are wasted than there are": "more rows are wasted than were planned",
}


def begin() -> Cluster:
    """A worker with two decodes and a long prompt, and another one."""
    c = Cluster(make_core(max_inflight_steps=1, prefill_chunk_tokens=4))
    c.begin(num_blocks=40)
    c.arrive_together(*(make_request(n, prompt=3, max_tokens=30) for n in "ab"))
    c.steps(2)
    c.arrive(make_request("long", prompt=40, max_tokens=2))
    c.step()
    assert c.last.plans[0].num_rows == 3
    c.begin("other", num_blocks=40)
    return c


@pytest.mark.parametrize("what", lies())
def test_a_worker_whose_result_cannot_be_is_given_up(what: str) -> None:
    c = begin()
    true = c.result()
    assert isinstance(true, StepCompleted)
    c.feed(lies()[what](true))
    assert (c.given_up, c.why_given_up) == ([WorkerId("w")], [TOLD.get(what, what)])
    assert c.core.stats.num_bad_results == 1
    c.run()
    for request_id, stream in c.gateway.streams.items():
        assert (stream.tokens, stream.end) == expected_output(stream.arrival), request_id
    c.assert_idle()


def test_a_result_that_can_be_costs_nothing() -> None:
    c = begin()
    c.run()
    assert (c.given_up, c.core.stats.num_bad_results) == ([], 0)


@pytest.mark.parametrize("fails", [False, True])
def test_an_operation_cannot_be_done_before_its_plan(fails: bool) -> None:
    """The next plan in flight swaps a request out, whose rows are in the steps before."""
    c = Cluster(
        make_core(
            max_inflight_steps=4,
            preemption_mode="swap",
            watermark=0.0,
            enable_prefix_caching=False,
        )
    )
    c.begin(num_blocks=6, num_host_blocks=8)
    c.arrive_together(*(make_request(n, prompt=10, max_tokens=8) for n in ("first", "second")))
    while not any(plan.operations for plan in c.last.plans):
        c.step()
    (operation,) = (o for plan in c.last.plans for o in plan.operations)
    second = c.core.explain(RequestId(b"second"))
    assert second is not None
    assert second.state is RequestState.SWAPPED
    event = c.result(fail=fails)
    assert isinstance(event, StepFailed if fails else StepCompleted)
    assert operation.op_id not in event.operations_done
    c.feed(replace(event, operations_done=(operation.op_id,)))
    assert (c.given_up, c.core.stats.num_bad_results) == ([WorkerId("w")], 1)
    assert c.why_given_up == ["an operation is done before its plan"]
    c.begin("other", num_blocks=20)
    c.run()
    assert {stream.end for stream in c.gateway.streams.values()} == {FinishReason.LENGTH}
    c.assert_idle()


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_request_that_its_worker_does_not_end_is_ended(num_chunks: int) -> None:
    """With its last token as a decode, and as the first sample after a prompt."""
    c = Cluster(make_core(max_inflight_steps=1, prefill_chunk_tokens=4))
    c.begin()
    max_tokens = 3 if num_chunks == 1 else 1
    c.arrive(make_request("a", prompt=4 * num_chunks, max_tokens=max_tokens))
    while not c.finishes:
        event = c.result()
        assert isinstance(event, StepCompleted)
        c.feed(replace(event, finished=()))
    assert c.finish("a").reason is FinishReason.ERROR
    assert c.finish("a").num_output_tokens == max_tokens
    assert "did not end" in c.finish("a").message
    c.run()
    c.assert_idle()
