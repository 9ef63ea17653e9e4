"""Stop strings across the borders of pieces: the same as looking at the text as a whole."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.stopping import StopMatcher

LETTERS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Cuts where the stop string begins that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [len(s) for s in stops if text[:end].endswith(s)]
        if complete:
            return text[: end - max(complete)], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    """All pieces through a matcher."""
    matcher, given_ = StopMatcher(stops), ""
    for piece in pieces:
        given_ += matcher.push(piece)
        if matcher.stopped:
            return given_, True
    return given_ + matcher.flush(), False


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_equals_a_search_in_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    """However the text is cut into pieces."""
    assert run(pieces, stops) == naive("".join(pieces), stops)


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_holds_back_no_more_than_needed(pieces: list[str], stops: list[str]) -> None:
    """What is held is the longest end of the text that begins a stop string."""
    matcher, seen, given_ = StopMatcher(stops), "", ""
    for piece in pieces:
        seen += piece
        given_ += matcher.push(piece)
        if matcher.stopped:
            return
        held = seen[len(given_) :]
        begins = [s[:k] for s in stops for k in range(1, len(s)) if seen.endswith(s[:k])]
        assert held == max(begins, key=len, default="")


def test_a_stop_string_over_three_pieces() -> None:
    """Nothing of it is given."""
    assert run(["say ", "E", "N", "D now"], ["END"]) == ("say ", True)


def test_a_beginning_that_leads_nowhere_is_given() -> None:
    """The held text comes with the next piece."""
    matcher = StopMatcher(["END"])
    assert matcher.push("say EN") == "say "
    assert matcher.push("!") == "EN!"
    assert matcher.flush() == ""


def test_with_the_stop_string_nothing_is_held_back() -> None:
    """All text is given anyway, up to the end of the stop string."""
    matcher = StopMatcher(["END"], include_stop=True)
    assert matcher.push("say E") == "say E"
    assert matcher.push("ND now") == "ND"
    assert matcher.stopped
    assert matcher.flush() == ""


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_the_stop_string_is_all_that_is_added(pieces: list[str], stops: list[str]) -> None:
    """The same place is found, and the cut is behind it."""
    matcher, given_ = StopMatcher(stops, include_stop=True), ""
    for piece in pieces:
        given_ += matcher.push(piece)
        if matcher.stopped:
            break
    without, stopped = naive("".join(pieces), stops)
    assert matcher.stopped == stopped
    if stopped:
        assert given_.startswith(without)
        assert given_[len(without) :] in stops
    else:
        assert given_ == without
