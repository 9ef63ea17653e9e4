"""Outboxes: every batch once and in order, also over broken streams, and within bounds."""

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gpu_worker import token_hub
from gpu_worker.messages import Subscribe, TokenBatch, TokenLogprobs
from gpu_worker.token_hub import AllSentError, HubFullError, StreamEndedError, TokenHub, TokenStream
from servicekit.logs import get_logger
from tests.stub_worker.fake_runner import fake_logprobs
from tests.worker_builders import GATEWAY_A, GATEWAY_B


def batch(step: int, num_logprobs: int = 0) -> TokenBatch:
    """One token; with logprobs, so many of the likeliest tokens beside it."""
    scores = fake_logprobs([step], num_logprobs, 1 << 30)
    entry = TokenLogprobs(
        entry=0,
        num_prompt_rows=0,
        num_top=scores.num_top,
        logprobs=scores.logprobs,
        top_token_ids=scores.top_token_ids,
        top_logprobs=scores.top_logprobs,
    )
    return TokenBatch(
        step=step,
        request_ids=[b"r" * 16],
        attempts=[1],
        first_positions=[step],
        num_tokens=[1],
        token_ids=[step],
        finish_reasons=[0],
        num_cached_tokens=[0],
        logprobs=[entry] if num_logprobs else (),
    )


class Bench:
    """A hub with a clock that the test turns."""

    def __init__(self, max_batches: int = 8, max_outboxes: int = 4) -> None:
        self.now_s = 0.0
        self.told: list[list[str]] = []
        self.hub = TokenHub(
            max_batches=max_batches,
            max_outboxes=max_outboxes,
            clock_s=lambda: self.now_s,
            on_subscriptions=lambda ids: self.told.append(list(ids)),
            log=get_logger("test"),
        )

    def publish(self, *steps: int, to: bytes = GATEWAY_A) -> None:
        for step in steps:
            self.hub.publish([(to, batch(step))])

    def subscribe(
        self, last_sequence: int = 0, reply_to: bytes = GATEWAY_A, name: str = "a"
    ) -> TokenStream:
        return self.hub.subscribe(
            Subscribe(
                gateway_id=name, reply_to=reply_to, incarnation=1, last_sequence=last_sequence
            )
        )


def steps(stream: TokenStream) -> list[tuple[int, int]]:
    """(sequence, step) of all that the stream would send now."""
    found: list[tuple[int, int]] = []
    while batches := stream.next_batches():
        found.extend((sequence, sent.step) for sequence, sent in batches)
    return found


def test_batches_wait_for_a_gateway_that_has_not_subscribed() -> None:
    bench = Bench()
    bench.publish(10, 11)
    stream = bench.subscribe()
    assert not stream.gap
    assert steps(stream) == [(1, 10), (2, 11)]
    bench.publish(12)
    assert steps(stream) == [(3, 12)]
    assert steps(stream) == []


def test_a_new_stream_goes_on_after_the_last_batch_received() -> None:
    bench = Bench()
    first = bench.subscribe()
    bench.publish(10, 11, 12)
    steps(first)
    bench.hub.unsubscribe(first)
    bench.publish(13)
    again = bench.subscribe(last_sequence=1)
    assert not again.gap
    assert steps(again) == [(2, 11), (3, 12), (4, 13)]


def test_acknowledged_batches_are_dropped_and_unsent_ones_are_not() -> None:
    bench = Bench()
    stream = bench.subscribe()
    bench.publish(10, 11)
    steps(stream)
    bench.publish(12)
    stream.acknowledge(3)
    assert bench.hub.num_batches == 1
    assert steps(stream) == [(3, 12)]
    stream.acknowledge(2**63)
    assert (bench.hub.num_batches, bench.hub.num_unacknowledged) == (0, 0)


def test_a_full_outbox_drops_its_oldest_batches_and_says_so() -> None:
    bench = Bench(max_batches=4)
    bench.publish(*range(10))
    assert (bench.hub.num_batches, bench.hub.num_dropped_batches) == (4, 6)
    stream = bench.subscribe()
    assert stream.gap
    assert steps(stream) == [(7, 6), (8, 7), (9, 8), (10, 9)]


def test_logprobs_have_a_bound_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_hub, "MAX_OUTBOX_LOGPROBS", 20)
    bench = Bench()
    for step in range(4):
        bench.hub.publish([(GATEWAY_A, batch(step, num_logprobs=9))])
    assert (bench.hub.num_batches, bench.hub.num_dropped_batches) == (2, 2)
    bench.publish(4, 5)
    assert bench.hub.num_batches == 4
    bench.hub.publish([(GATEWAY_A, batch(6, num_logprobs=99))])
    assert bench.hub.num_batches == 1, "the newest stays whatever it holds"
    stream = bench.subscribe()
    assert stream.gap
    ((sequence, sent),) = stream.next_batches()
    assert (sequence, sent.logprobs) == (7, batch(6, num_logprobs=99).logprobs)


def test_acknowledged_logprobs_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_hub, "MAX_OUTBOX_LOGPROBS", 20)
    bench = Bench()
    stream = bench.subscribe()
    for step in range(50):
        bench.hub.publish([(GATEWAY_A, batch(step, num_logprobs=9))])
        ((sequence, _),) = stream.next_batches()
        if step % 2:
            stream.acknowledge(sequence)
    assert bench.hub.num_dropped_batches == 0


def test_no_gap_is_told_when_only_received_batches_were_dropped() -> None:
    bench = Bench(max_batches=4)
    bench.publish(*range(6))
    stream = bench.subscribe(last_sequence=2)
    assert not stream.gap
    assert [sequence for sequence, _ in steps(stream)] == [3, 4, 5, 6]


def test_a_stream_too_slow_for_its_outbox_ends() -> None:
    bench = Bench(max_batches=4)
    stream = bench.subscribe()
    bench.publish(*range(5))
    with pytest.raises(StreamEndedError, match="too slow"):
        stream.next_batches()
    bench.hub.unsubscribe(stream)
    assert bench.subscribe().gap


def test_a_slow_gateway_does_not_hold_up_another() -> None:
    bench = Bench(max_batches=4)
    bench.subscribe(name="slow")
    quick = bench.subscribe(reply_to=GATEWAY_B, name="quick")
    for step in range(100):
        bench.publish(step)
        bench.publish(step, to=GATEWAY_B)
        ((sequence, _),) = steps(quick)
        quick.acknowledge(sequence)
    assert bench.hub.num_batches == 4


def test_a_second_stream_of_a_gateway_ends_the_first() -> None:
    bench = Bench()
    first = bench.subscribe()
    second = bench.subscribe()
    with pytest.raises(StreamEndedError, match="another stream"):
        first.next_batches()
    bench.hub.unsubscribe(first)
    bench.publish(10)
    assert steps(second) == [(1, 10)]
    assert bench.told[-1] == ["a"]


def test_subscriptions_are_told_on_change() -> None:
    bench = Bench()
    a = bench.subscribe()
    bench.subscribe(reply_to=GATEWAY_B, name="b")
    bench.hub.unsubscribe(a)
    assert bench.told == [["a"], ["a", "b"], ["b"]]


def test_the_outbox_of_a_gateway_gone_for_a_minute_is_dropped() -> None:
    bench = Bench()
    stream = bench.subscribe()
    bench.publish(10, 11)
    steps(stream)
    bench.now_s = 1000.0
    bench.hub.sweep()
    assert bench.hub.num_outboxes == 1
    bench.hub.unsubscribe(stream)
    bench.now_s += token_hub.GONE_S - 1
    bench.hub.sweep()
    assert bench.hub.num_outboxes == 1
    bench.now_s += 1
    bench.hub.sweep()
    assert bench.hub.num_outboxes == 0


def test_a_gateway_that_returns_after_its_outbox_was_dropped_is_told_of_the_gap() -> None:
    bench = Bench()
    bench.publish(20)
    stream = bench.subscribe(last_sequence=7)
    assert stream.gap
    assert steps(stream) == [(8, 20)]
    bench.publish(21)
    assert steps(stream) == [(9, 21)]


def test_outboxes_are_bounded_and_connected_ones_stay() -> None:
    bench = Bench(max_outboxes=2)
    keys = [bytes([number]) * 16 for number in range(5)]
    stream = bench.subscribe(reply_to=keys[0])
    for number, key in enumerate(keys[1:]):
        bench.now_s = float(number)
        bench.publish(number, to=key)
        assert bench.hub.num_outboxes == 2
    assert steps(bench.subscribe(reply_to=keys[4], name="b")) == [(1, 3)]
    with pytest.raises(HubFullError):
        bench.subscribe(reply_to=keys[1], name="c")
    bench.publish(9, to=keys[1])
    assert bench.hub.num_dropped_batches == 1
    assert steps(stream) == []


async def test_publishing_wakes_the_stream() -> None:
    bench = Bench()
    stream = bench.subscribe()
    stream.wake.clear()
    waiting = asyncio.ensure_future(stream.wake.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    bench.publish(1)
    assert await waiting


@given(
    actions=st.lists(
        st.one_of(
            st.just("publish"),
            st.just("break"),
            st.just("acknowledge"),
            st.tuples(st.just("receive"), st.integers(1, 5)),
        ),
        max_size=60,
    )
)
def test_every_batch_arrives_once_and_in_order_while_the_bound_holds(actions: list[object]) -> None:
    """A gateway that loses its stream at any moment, with some batches sent but not received."""
    bench = Bench(max_batches=1000)
    received: list[int] = []
    stream = bench.subscribe()
    on_the_way: list[tuple[int, TokenBatch]] = []
    num_published = 0

    def receive(count: int) -> None:
        on_the_way.extend(stream.next_batches())
        for sequence, sent in on_the_way[:count]:
            assert sequence == len(received) + 1
            received.append(sent.step)
        del on_the_way[:count]

    for action in actions:
        match action:
            case "publish":
                bench.publish(num_published)
                num_published += 1
            case "break":
                on_the_way.extend(stream.next_batches())
                on_the_way.clear()
                bench.hub.unsubscribe(stream)
                stream = bench.subscribe(last_sequence=len(received))
                assert not stream.gap
            case "acknowledge":
                stream.acknowledge(len(received))
            case ("receive", int(count)):
                receive(count)
    while len(received) < num_published:
        receive(num_published)
    assert received == list(range(num_published))


def test_a_hub_that_closes_lets_its_streams_send_all_before_they_end() -> None:
    bench = Bench()
    stream = bench.subscribe()
    bench.publish(10, 11)
    bench.hub.close()
    assert [sequence for sequence, _ in stream.next_batches()] == [1, 2]
    with pytest.raises(AllSentError):
        stream.next_batches()
