"""vLLM's /tokenize and /detokenize."""

from typing import Any

import httpx
import pytest

from tests.unit.gateway.fakes import make_bench
from tests.unit.gateway.test_auth import client_of


async def post(path: str, body: dict[str, Any]) -> httpx.Response:
    """One answer; nothing may reach the queue."""
    bench = make_bench()
    async with client_of(bench, None) as client:
        response = await client.post(f"http://127.0.0.1/{path}", json=body)
    assert bench.queue.admitted == []
    return response


async def test_a_prompt() -> None:
    """Its tokens and their number; their texts where they are asked for."""
    response = await post("tokenize", {"model": "tiny", "prompt": "hé"})
    assert response.json() == {
        "count": 2, "max_model_len": 512, "tokens": [104, 233], "token_strs": None,
    }  # fmt: skip
    response = await post("tokenize", {"prompt": "hé", "return_token_strs": True})
    assert response.json()["token_strs"] == ["h", "é"]


async def test_a_conversation() -> None:
    """Through the chat template; what goes behind it may be chosen."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    response = await post("tokenize", {"messages": messages, "add_generation_prompt": False})
    assert response.json()["tokens"] == [104, 105]


async def test_a_prompt_longer_than_the_context_is_only_counted() -> None:
    """That is what clients ask this route for."""
    response = await post("tokenize", {"prompt": "x" * 600})
    assert response.json()["count"] == 600


async def test_an_empty_prompt_has_no_tokens() -> None:
    """And no error."""
    assert (await post("tokenize", {"prompt": ""})).json()["tokens"] == []
    assert (await post("detokenize", {"tokens": []})).json() == {"prompt": ""}


async def test_tokens_to_text() -> None:
    """All of it: special tokens too, as vLLM gives them."""
    response = await post("detokenize", {"tokens": [104, 233, 3]})
    assert response.json() == {"prompt": "hé<3>"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("tokenize", {"messages": []}, 400, "messages"),
        ("tokenize", {"messages": [{}] * 4097}, 400, "messages"),
        ("tokenize", {"messages": [{"role": "tool", "content": ""}]}, 400, "messages[0]"),
        ("tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
        ("tokenize", {"prompt": "a", "tools": [{}]}, 400, "tools"),
        ("tokenize", {"prompt": "a", "chat_template": "{{ x }}"}, 400, "chat_template"),
        ("tokenize", {"prompt": "x" * 65_537}, 413, None),
        ("detokenize", {}, 400, "tokens"),
        ("detokenize", {"tokens": "a"}, 400, "tokens"),
        ("detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("detokenize", {"tokens": [0x3000]}, 400, "tokens"),
        ("detokenize", {"tokens": [2**31]}, 400, "tokens"),
        ("detokenize", {"tokens": [1.5]}, 400, "tokens.0"),
        ("detokenize", {"tokens": [True]}, 400, "tokens.0"),
        ("detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_refusals(path: str, body: dict[str, Any], status: int, param: str | None) -> None:
    """Named by field."""
    response = await post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
