"""Tokens to chunks: hidden tokens, stop strings with the right number of tokens, the end."""

from gateway.core.output import OutputAssembler
from gateway.core.types import FinishReason, Terminal, TokenLogprob

LENGTH = Terminal(reason=FinishReason.LENGTH)
STOP = Terminal(reason=FinishReason.STOP)


class FakeDetokenizer:
    """Token 65 is "A" and so on; what is below 32 has no text yet and shows at the end."""

    def __init__(self) -> None:
        self._rest = ""

    def push(self, token: int) -> str:
        """One letter."""
        if token < 32:
            self._rest += "?"
            return ""
        return chr(token)

    def flush(self) -> str:
        """What never became a letter."""
        return self._rest


def assembler(
    *stops: str, stop_ids: tuple[int, ...] = (), min_tokens: int = 0, **how: bool
) -> OutputAssembler:
    """With FakeDetokenizer."""
    return OutputAssembler(
        FakeDetokenizer(), stops=stops, stop_token_ids=stop_ids, min_tokens=min_tokens, **how
    )


def letters(text: str) -> list[int]:
    """Tokens of a text."""
    return [ord(c) for c in text]


def test_stop_tokens_have_no_text_and_are_counted() -> None:
    """As in the usage that other servers report."""
    out = assembler(stop_ids=(90,))
    chunk = out.push(letters("ABZ"), STOP)
    assert (chunk.text, chunk.end, out.num_tokens) == ("AB", STOP, 3)


def test_a_stop_string_ends_with_the_token_that_completes_it() -> None:
    """Tokens behind it in the same batch were never given."""
    out = assembler("CD")
    chunk = out.push(letters("ABCDEF"), LENGTH)
    assert (chunk.text, chunk.end, out.num_tokens) == ("AB", STOP, 4)
    assert chunk.token_ids == letters("ABCD")


def test_text_held_for_a_stop_string_comes_at_the_end() -> None:
    """It was no stop string after all."""
    out = assembler("CD")
    assert out.push(letters("ABC"), None).text == "AB"
    assert out.push([], LENGTH).text == "C"


def test_stop_strings_count_after_min_tokens() -> None:
    """What stands before is given as it is."""
    out = assembler("A", min_tokens=2)
    chunk = out.push(letters("AABA"), LENGTH)
    assert (chunk.text, chunk.end) == ("AAB", STOP)


def test_unfinished_text_is_shown_and_searched() -> None:
    """The rest of the detokenizer goes the same way as all text."""
    assert assembler().push([1], LENGTH).text == "?"
    chunk = assembler("?").push([65, 1], LENGTH)
    assert (chunk.text, chunk.end) == ("A", STOP)


def test_the_end_may_be_part_of_the_output() -> None:
    """A stop string, or the text of a stop token."""
    assert assembler("CD", include_stop=True).push(letters("ABCDE"), None).text == "ABCD"
    out = assembler(stop_ids=(90,), include_stop=True)
    assert out.push(letters("ABZ"), STOP).text == "ABZ"


def test_logprobs_end_where_the_tokens_end() -> None:
    """At a stop string, too."""
    rows = [TokenLogprob(token_id=token, logprob=-1.0) for token in letters("ABCDEF")]
    chunk = assembler("CD").push(letters("ABCDEF"), LENGTH, rows)
    assert [entry.token_id for entry in chunk.logprobs] == list(chunk.token_ids) == letters("ABCD")
    assert assembler().push(letters("AB"), None, rows[:2]).logprobs == rows[:2]
    assert assembler().push(letters("AB"), None).logprobs == ()


def test_an_answer_without_output() -> None:
    """The token that was computed is neither shown nor counted, whatever it was."""
    out = assembler(hidden=True)
    chunk = out.push(letters("A"), STOP)
    assert (chunk.text, chunk.token_ids, out.num_tokens) == ("", (), 0)
    assert chunk.end == LENGTH
    failed = Terminal(reason=FinishReason.ERROR)
    assert assembler(hidden=True).push([], failed).end == failed
