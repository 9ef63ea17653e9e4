"""Logprobs as OpenAI's two interfaces show them."""

from gateway.core.types import TokenLogprob
from gateway.rest.logprobs import ChatLogprobs, CompletionLogprobs, joined, token_text
from tests.unit.gateway.fakes import FakeTokenizer

TOKENIZER = FakeTokenizer()


def entry(text: str, *top: str, first: float = -0.5) -> TokenLogprob:
    """A token of one character, less likely by one with each of the others."""
    return TokenLogprob(
        token_id=ord(text),
        logprob=first,
        top=tuple((ord(c), -0.5 - k) for k, c in enumerate(top)),
    )


def completion() -> CompletionLogprobs:
    """Over the fake tokenizer."""
    return CompletionLogprobs(TOKENIZER.token_bytes, TOKENIZER.detokenizer, TOKENIZER.detokenizer())


def test_a_chats_logprobs() -> None:
    """An object per token."""
    assert ChatLogprobs(TOKENIZER.token_bytes).output([entry("é", "é", "b"), entry("\3")]) == {
        "content": [
            {
                "token": "é",
                "logprob": -0.5,
                "bytes": [195, 169],
                "top_logprobs": [
                    {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
                    {"token": "b", "logprob": -1.5, "bytes": [98]},
                ],
            },
            {"token": "<3>", "logprob": -0.5, "bytes": [60, 51, 62], "top_logprobs": []},
        ],
        "refusal": None,
    }


def test_a_completions_logprobs() -> None:
    """Columns; the token stands among its top ones once, wherever it ranks; special ones count."""
    writer = completion()
    rows = [entry("a", "a", "b"), entry("c", "a", "b", first=-7.0), entry("\3", "\3")]
    assert writer.output(rows) == {
        "tokens": ["a", "c", "<3>"],
        "token_logprobs": [-0.5, -7.0, -0.5],
        "top_logprobs": [
            {"a": -0.5, "b": -1.5},
            {"a": -0.5, "b": -1.5, "c": -7.0},
            {"<3>": -0.5},
        ],
        "text_offset": [0, 1, 2],
    }
    # Special tokens have no text here, so the next one begins where this one did.
    assert writer.output([entry("d")])["text_offset"] == [2]


def test_a_prompts_logprobs() -> None:
    """Its first token has none; offsets of the output go on behind the text that is echoed."""
    writer = completion()
    prompt = writer.prompt([ord(c) for c in "xyz"], [entry("y", "q"), entry("z")], "xyz!")
    assert prompt == {
        "tokens": ["x", "y", "z"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {"q": -0.5, "y": -0.5}, {"z": -0.5}],
        "text_offset": [0, 1, 2],
    }
    output = writer.output([entry("a"), entry("b")])
    assert output["text_offset"] == [4, 5]
    assert joined([prompt, output])["tokens"] == ["x", "y", "z", "a", "b"]


def test_of_equal_texts_the_likeliest_stands() -> None:
    """Halves of characters may look alike, and a dictionary has each key once."""
    twins = TokenLogprob(token_id=255, logprob=-4.0, top=((255, -0.5), (255, -3.0)))
    assert completion().output([twins])["top_logprobs"] == [{"bytes:\\xc3": -0.5}]


def test_tokens_that_are_no_whole_characters() -> None:
    """Shown as their bytes, so that no two of them look alike."""
    assert token_text("né".encode()) == "né"
    assert token_text(b"n\xc3") == "bytes:\\x6e\\xc3"
    assert token_text(b"\xa9") == "bytes:\\xa9"
    assert token_text(b"") == ""
