"""What a client gets from repeats, losses and later attempts: each token once, one end."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.stream import MAX_SUPERSEDES, Fed, StreamState
from gateway.core.types import FinishReason, Terminal, TokenLogprob

STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR
CANCELLED = Terminal(reason=FinishReason.CANCELLED)


def state_of(*tokens: int, attempt: int = 1) -> StreamState:
    """A stream that holds tokens."""
    state = StreamState()
    state.feed(attempt, 0, list(tokens))
    return state


def test_tokens_are_appended_in_order() -> None:
    """take gives each once."""
    state = state_of(5, 6)
    assert state.take() == [5, 6]
    assert state.feed(1, 2, [7]) is Fed.NEWS
    assert state.take() == [7]
    assert state.take() == []


def test_equal_repeats_are_dropped_and_counted() -> None:
    """What is new behind them is appended."""
    state = state_of(5, 6)
    assert state.feed(1, 0, [5, 6]) is Fed.NOTHING
    assert state.feed(1, 1, [6, 7]) is Fed.NEWS
    assert state.tokens == [5, 6, 7]
    assert state.num_repeated == 3


def test_an_unequal_repeat_is_a_divergence() -> None:
    """Nothing of it is appended."""
    state = state_of(5, 6)
    assert state.feed(2, 0, [5, 9, 7]) is Fed.DIVERGED
    assert state.tokens == [5, 6]
    assert state.attempt == 2


def test_a_missing_position_is_a_gap() -> None:
    """Also where only the end would come."""
    state = state_of(5)
    assert state.feed(1, 2, [7]) is Fed.GAP
    assert state.feed(1, 2, [], LENGTH) is Fed.GAP
    assert state.end is None


def test_lower_attempts_are_dropped() -> None:
    """Even with an end."""
    state = state_of(5, attempt=3)
    assert state.feed(2, 1, [6], STOP) is Fed.NOTHING
    assert state.tokens == [5]
    assert state.end is None


def test_a_later_attempt_that_ends_earlier_is_a_divergence() -> None:
    """The client already has more."""
    assert state_of(5, 6, 7).feed(2, 0, [5, 6], STOP) is Fed.DIVERGED


def test_an_end_comes_with_its_tokens() -> None:
    """And nothing follows."""
    state = state_of(5)
    assert state.feed(1, 1, [6], LENGTH) is Fed.NEWS
    assert state.end == Terminal(reason=LENGTH)
    assert state.feed(1, 2, [7]) is Fed.NOTHING
    assert state.close(CANCELLED) is Fed.NOTHING
    assert state.tokens == [5, 6]


def test_a_failed_row_ends_wherever_it_stood() -> None:
    """It has no tokens to be in order with."""
    state = state_of(5, 6)
    assert state.feed(1, 0, [], ERROR) is Fed.NEWS
    assert state.end is not None
    assert state.end.reason is ERROR


def test_superseding_raises_the_attempt_a_bounded_number_of_times() -> None:
    """Then the client gets an error."""
    state = state_of(5)
    assert [state.supersede() for _ in range(MAX_SUPERSEDES + 1)] == [True] * 3 + [False]
    assert state.attempt == 4
    assert state.feed(3, 1, [6]) is Fed.NOTHING


def test_a_stream_that_goes_on_may_be_superseded_after_each_token() -> None:
    """One worker after the other may be lost. What repeats is no progress."""
    state = state_of(5)
    for token in range(6, 6 + 4 * MAX_SUPERSEDES):
        assert state.supersede()
        assert state.feed(state.attempt, len(state.tokens), [token]) is Fed.NEWS
    assert state.num_superseded == 0
    for _ in range(MAX_SUPERSEDES):
        assert state.supersede()
        assert state.feed(state.attempt, 0, [5, 6]) is Fed.NOTHING
    assert not state.supersede()


def test_superseding_on_suspicion_does_not_count() -> None:
    """Workers that go may have had its first token, one after the other."""
    state = StreamState()
    assert all(state.supersede(counts=False) for _ in range(10 * MAX_SUPERSEDES))
    assert (state.attempt, state.num_superseded) == (10 * MAX_SUPERSEDES + 1, 0)


@given(
    output=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    cuts=st.lists(st.tuples(st.integers(0, 29), st.integers(1, 8)), max_size=40),
    data=st.data(),
)
def test_each_token_exactly_once(
    output: list[int], cuts: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Any order of repeats, gaps and old attempts of one true output ends in that output."""
    state, taken = StreamState(), list[int]()
    for start, length in cuts:
        attempt = max(state.attempt + data.draw(st.integers(-1, 1)), 1)
        held = len(state.tokens)
        fed = state.feed(attempt, start, output[start : start + length])
        if start > held and attempt >= state.attempt:
            assert fed is Fed.GAP
        else:
            assert fed in (Fed.NEWS, Fed.NOTHING)
        taken += state.take()
        assert taken == state.tokens == output[: len(taken)]
    while state.end is None:
        at = len(state.tokens)
        step = output[at : at + 3]
        state.feed(state.attempt, at, step, LENGTH if at + len(step) == len(output) else 0)
    assert taken + state.take() == output


def logprobs(*tokens: int) -> list[TokenLogprob]:
    """One per token."""
    return [TokenLogprob(token_id=token, logprob=-float(token)) for token in tokens]


def test_logprobs_stay_with_their_tokens() -> None:
    """Those of dropped repeats are dropped; those of a divergence or a gap are never kept."""
    state = StreamState()
    state.feed(1, 0, [5, 6], 0, logprobs(5, 6))
    assert state.feed(2, 0, [5, 6, 7], 0, logprobs(5, 6, 7)) is Fed.NEWS
    assert state.feed(2, 2, [9], 0, logprobs(9)) is Fed.DIVERGED
    assert state.feed(2, 4, [9], 0, logprobs(9)) is Fed.GAP
    assert state.feed(1, 3, [9], 0, logprobs(9)) is Fed.NOTHING
    assert [entry.token_id for entry in state.logprobs] == state.tokens == [5, 6, 7]


def test_what_has_been_taken_is_counted() -> None:
    """So that columns beside the tokens can be read from there on."""
    state = state_of(5, 6)
    assert (state.num_taken, state.num_unread) == (0, 2)
    state.take()
    assert (state.num_taken, state.num_unread) == (2, 0)
