"""Bodies that would make millions of values are refused before any is made."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from gateway.core.errors import RejectReason, RequestRejected
from gateway.rest import bodies
from gateway.rest.json_size import json_size
from gateway.rest.schemas import CompletionBody

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(['\\"', ",[{:", "\\"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Values, names and containers, by walking them."""
    inner = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(inner, list):
        return 1, 0, 0
    parts = [counted(part) for part in inner]
    values, names, containers = (sum(column) for column in zip(*parts, strict=True)) if parts else (
        0, 0, 0
    )  # fmt: skip
    return values + 1, names + len(inner) * isinstance(value, dict), containers + 1


@given(VALUES, st.booleans())
def test_what_stands_outside_strings_is_counted(value: Any, escaped: bool) -> None:
    values, names, containers = counted(value)
    size = json_size(json.dumps(value, ensure_ascii=escaped).encode("utf-8", "surrogatepass"))
    assert size.num_names == names
    assert size.num_containers == containers
    # An empty container is counted as one that holds a value.
    assert values <= size.num_values <= values + containers


@pytest.mark.parametrize("data", [b"", b'"', b"\\", b'"\\', b'\\"[', b'[,"\\\\",[', b"\xff[\x00,"])
def test_no_bytes_are_too_odd_to_count(data: bytes) -> None:
    assert json_size(data).num_values >= 1


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        ('"prompt":[' + ",".join(["1"] * 300_000) + "]", "262144 values"),
        ('"prompt":[' + ",".join(["[]"] * 30_000) + "]", "16384 lists and objects"),
        ('"prompt":"x","a":[' + ",".join(["{}"] * 30_000) + "]", "16384 lists and objects"),
        (
            '"prompt":"x","logit_bias":{' + ",".join(f'"{i}":1' for i in range(40_000)) + "}",
            "32768 names",
        ),
    ],
)
async def test_more_than_the_loop_can_bear_is_refused(
    inside: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    monkeypatch.setattr(bodies, "parse", lambda data, _: parsed.append(len(data)))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": f"{{{inside}}}".encode(), "more_body": False}

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    with pytest.raises(RequestRejected, match=words) as refusal:
        await bodies.BodyReader(2**22).read(request, CompletionBody)
    assert refusal.value.reason is RejectReason.TOO_LARGE
    assert parsed == [], "nothing was made of it"


def test_punctuation_inside_a_long_text_is_text() -> None:
    data = json.dumps({"prompt": ',[{:"\\' * 500_000}).encode()
    bodies.check_size(json_size(data))


def test_a_prompt_of_as_many_tokens_as_values_passes() -> None:
    data = json.dumps({"prompt": [1] * (bodies.MAX_VALUES - 3)}).encode()
    bodies.check_size(json_size(data))
    more = json.dumps({"prompt": [1] * bodies.MAX_VALUES}).encode()
    with pytest.raises(RequestRejected) as refusal:
        bodies.check_size(json_size(more))
    assert refusal.value.reason is RejectReason.TOO_LARGE
