"""Bodies that are no JSON, or JSON that two readers could read differently."""

import pytest

from gateway.core.errors import RejectReason, RequestRejected
from gateway.core.wording import shown
from gateway.rest.bodies import parse
from gateway.rest.errors import to_json
from gateway.rest.schemas import ChatBody, CompletionBody
from tests.unit.gateway.fakes import make_bench
from tests.unit.gateway.test_auth import client_of

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"{'prompt': 'x'}", "not valid JSON"),
        (b'{"prompt": "x"} {}', "not valid JSON"),
        (b'{"prompt": "\n"}', "not valid JSON"),
        (b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN is no number"),
        (b'{"prompt": "x", "temperature": -Infinity}', "-Infinity is no number"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'\xef\xbb\xbf{"prompt": "x"}', "not valid JSON"),
        ('{"prompt": "x"}'.encode("utf-16"), "not UTF-8"),
        (b"[" * 60_000, "nested too deeply"),
        (b'{"prompt": ' + b'{"a":' * 60_000, "nested too deeply"),
        (b"[]", "must be a JSON object"),
        (b'"prompt"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"prompt": "x", "prompt": "y"}', "prompt: stands more than once"),
        (b'{"prompt": "x", "\\u0070rompt": "y"}', "prompt: stands more than once"),
        (b'{"prompt": "x", "logit_bias": {"1": 1, "1": 2}}', "1: stands more than once"),
        (b'{"a\\u0000\\ud800": 1, "a\\u0000\\ud800": 1}', "a\\\\x00\\\\ud800: stands more"),
    ],
)
def test_what_is_refused(data: bytes, words: str) -> None:
    """By us, in words that hold nothing of the parser's."""
    with pytest.raises(RequestRejected, match=words) as caught:
        parse(data, CompletionBody)
    assert len(caught.value.message) < 300
    assert "char" not in caught.value.message


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": "x", "logit_bias": {"\\ud800": "\\ud800"}}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "stop": ["\\udfff"]}',
        b'{"prompt": "x", "user": "\\ud800"}',
        b'{"prompt": "x", "model": "\\ud800"}',
        b'{"prompt": "x", "\\ud800": 1}',
        b'{"prompt": "x", "\\ud800": {"\\ud800": "\\ud800"}, "n": "\\ud800"}',
    ],
)
async def test_half_characters_end_nowhere(data: bytes) -> None:
    """They are refused or ignored, and never break an answer."""
    bench = make_bench()
    async with client_of(bench, None) as client:
        for path in ("/v1/completions", "/tokenize"):
            url = f"http://127.0.0.1{path}"
            bench.queue.error = RequestRejected(RejectReason.INVALID, "no")
            response = await client.post(url, content=data, headers=JSON)
            assert response.status_code in (200, 400, 404), response.text
            assert response.json()


def test_an_answer_can_always_be_written() -> None:
    """Whatever got into it."""
    assert to_json({"a": "\ud800"}) == b'{"a":"?"}'


def test_a_name_may_come_again_in_another_object() -> None:
    """Only within one object it may not."""
    body = parse(
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
        ChatBody,
    )
    assert [m.content for m in body.messages] == ["a", "b"]


def test_clients_words_are_shown_in_printable_ascii() -> None:
    """And not more of them than asked for."""
    assert shown("plain_name.0") == "plain_name.0"
    assert shown("a\n\0é\ud800😀\\") == r"a\n\x00\xe9\ud800\U0001f600" + r"\\"
    assert shown("x" * 500) == "x" * 100
