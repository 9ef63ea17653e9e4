"""Bad input to OpenAI's routes: each is a 400 that names its field and its limit."""

import json
import sys
import time
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from tests.unit.gateway.fakes import Bench, make_bench
from tests.unit.gateway.test_rest import STOP, ask, client_of

HI = [{"role": "user", "content": "hi"}]
MANY = 250_000  # nearly as many values as a body may hold; test_json_size has more
LAST_ID = 0x3000 - 1
JSON = {"content-type": "application/json"}


async def post(bench: Bench, path: str, body: Any) -> httpx.Response:
    """A body as it is, or as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client_of(bench, max_body_bytes=2**23) as client:
        return await client.post(f"/v1/{path}", content=data, headers=JSON)


async def refused(path: str, body: Any) -> dict[str, Any]:
    """The error object of a 400; nothing has reached the queue."""
    bench = make_bench()
    response = await post(bench, path, body)
    assert response.status_code == 400, response.text
    assert bench.queue.admitted == []
    assert bench.engine.num_live == 0
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 400
    return error


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"prompt": "x"} {}', "JSON"),
        (b"\xef\xbb\xbf{}", "JSON"),
        (b"[]", "object"),
        (b'[{"prompt": "x"}]', "object"),
        (b'"x"', "object"),
        (b"null", "object"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN"),
        (b'{"prompt": "x", "temperature": -Infinity}', "Infinity"),
        (b'{"prompt": "x", "whatever": Infinity}', "Infinity"),
        (b'{"prompt": "x", "prompt": "y"}', "prompt"),
        (b'{"prompt": "x", "logit_bias": {"5": 1, "5": 2}}', "more than once"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": ["ok", "\\udfff"]}', "surrogate"),
        (b'{"prompt": "x", "stop": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "user": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "cache_salt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "a": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", "deep"),
        (b'{"prompt": "x", "a": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001, "deep"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "JSON"),
    ],
)
async def test_bodies_that_are_no_request(data: bytes, word: str) -> None:
    """Told apart, without the decoder's own words."""
    error = await refused("completions", data)
    assert word in error["message"]
    assert "char " not in error["message"]
    assert "line " not in error["message"]


NUMBERS = ["max_tokens", "top_k", "seed", "min_tokens", "priority", "deadline_ms", "logprobs"]
REALS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"]
FLAGS = ["stream", "echo", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"]


@pytest.mark.parametrize("value", ["1", True, 1.5, [1], {}, 2**70, -(2**70), 10**400])
@pytest.mark.parametrize("name", NUMBERS)
async def test_whole_numbers_are_whole_numbers(name: str, value: object) -> None:
    """Neither strings nor booleans nor fractions, and none that 64 bits do not hold."""
    error = await refused("completions", {"prompt": "x", name: value})
    assert error["param"] == name
    assert name in error["message"]


@pytest.mark.parametrize("value", ["1", True, [], {}, 2.5, -2.5, 1e308, 10**400])
@pytest.mark.parametrize("name", [*REALS, "repetition_penalty"])
async def test_numbers_have_their_range(name: str, value: object) -> None:
    """Whatever else is not a number."""
    if name == "repetition_penalty" and value == 2.5:
        value = 100.5
    error = await refused("completions", {"prompt": "x", name: value})
    assert error["param"] == name


@pytest.mark.parametrize("value", [0, 1, "true", "", [], {}])
@pytest.mark.parametrize("name", FLAGS)
async def test_flags_are_true_or_false(name: str, value: object) -> None:
    """Nothing else is taken for one."""
    assert (await refused("completions", {"prompt": "x", name: value}))["param"] == name


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, ["string"]),
        (5, ["string"]),
        (True, ["string"]),
        ({"text": "x"}, ["string"]),
        ([None], ["string"]),
        ([1, "x"], ["list"]),
        (["x", 1], ["list"]),
        ([[1], "x"], ["list"]),
        ([[1], 1], ["list"]),
        ([[[1]]], ["list"]),
        ([1.0], ["list"]),
        ([True], ["list"]),
        ([[1, True]], ["list"]),
        ([[1, 2.5]], ["list"]),
        ([-1], ["0", str(LAST_ID)]),
        ([LAST_ID + 1], ["0", str(LAST_ID)]),
        ([2**31], ["0", str(LAST_ID)]),
        ([2**70], ["0", str(LAST_ID)]),
        ([[5], [-1]], ["prompt[1]", str(LAST_ID)]),
        ([], ["at least one token"]),
        ("", ["at least one token"]),
        ([[]], ["at least one token"]),
        (["x", ""], ["prompt[1]", "at least one token"]),
        (["x"] * 129, ["128", "129"]),
        (["x"] * MANY, ["128", str(MANY)]),
        ([[]] * 16_000, ["128", "16000"]),
        ("x" * 512, ["512 tokens", "context of 512"]),
        (["x", "x" * 600], ["prompt[1]", "600 tokens", "512"]),
        ([5] * MANY, [str(MANY), "512"]),
        ("x" * 70_000, ["70000 characters", "512 tokens"]),
    ],
)
async def test_prompts(prompt: object, words: list[str]) -> None:
    """Of one kind, of the vocabulary, of a length and a number that can be served."""
    error = await refused("completions", {"prompt": prompt})
    assert error["param"].split("[")[0] == "prompt"
    for word in words:
        assert word in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", ["at least 1"]),
        ({"max_tokens": -1}, "max_tokens", ["at least 1"]),
        ({"max_tokens": 513}, "max_tokens", ["513", "512"]),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", ["5", "4"]),
        ({"min_tokens": 17}, "min_tokens", ["17", "16"]),
        ({"stop": [""]}, "stop", ["1 to 1024 characters"]),
        ({"stop": ""}, "stop", ["1 to 1024 characters"]),
        ({"stop": ["x"] * 17}, "stop", ["16", "17"]),
        ({"stop": ["x"] * 10_000}, "stop", ["16", "10000"]),
        ({"stop": ["x" * 1025]}, "stop", ["1024"]),
        ({"stop": [1]}, "stop", []),
        ({"stop": 1}, "stop", []),
        ({"stop_token_ids": [LAST_ID + 1]}, "stop_token_ids", [str(LAST_ID)]),
        ({"stop_token_ids": [True]}, "stop_token_ids.0", []),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids", ["128", "129"]),
        ({"logit_bias": {"x": 1}}, "logit_bias", [str(LAST_ID)]),
        ({"logit_bias": {str(LAST_ID + 1): 1}}, "logit_bias", [str(LAST_ID)]),
        ({"logit_bias": {"5": 101}}, "logit_bias", ["-100 to 100"]),
        ({"logit_bias": {"5": "1"}}, "logit_bias", ["-100 to 100"]),
        ({"logit_bias": {"5": None}}, "logit_bias", ["-100 to 100"]),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", ["1024", "1025"]),
        ({"logit_bias": [5, 1]}, "logit_bias", []),
        ({"logprobs": 21}, "logprobs", ["0 to 20"]),
        ({"cache_salt": ""}, "cache_salt", ["1 to 256"]),
        ({"cache_salt": "x" * 2**20}, "cache_salt", ["256"]),
        ({"cache_salt": "a\0"}, "cache_salt", ["NUL"]),
        ({"user": "x" * 257}, "user", ["256"]),
        ({"user": 5}, "user", []),
        ({"deadline_ms": 0}, "deadline_ms", ["1"]),
        ({"n": 129}, "n", ["1 to 128"]),
        ({"n": 10**4}, "n", ["1 to 128"]),
        ({"n": 10**9}, "n", ["1 to 128"]),
        ({"n": 0}, "n", ["1 to 128"]),
        ({"n": -1}, "n", ["1 to 128"]),
        ({"n": "2"}, "n", []),
        ({"n": 1.5}, "n", []),
        ({"n": 1e308}, "n", []),
        ({"n": True}, "n", []),
        ({"n": 2, "prompt": ["x"] * 65}, "n", ["130", "128"]),
        ({"best_of": 2}, "best_of", ["not supported yet"]),
        ({"best_of": 2, "n": 1}, "best_of", ["not supported yet"]),
        ({"best_of": 2, "n": 3}, "best_of", ["not supported yet"]),
        ({"best_of": True}, "best_of", []),
        ({"suffix": "x"}, "suffix", ["not supported yet"]),
        ({"chat_template": "{{ 1 }}"}, "chat_template", ["not supported yet"]),
        ({"stream_options": []}, "stream_options", []),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", []),
    ],
)
async def test_fields(fields: dict[str, Any], param: str, words: list[str]) -> None:
    """Of a completion."""
    error = await refused("completions", {"prompt": "x", **fields})
    assert error["param"] == param
    for word in [param, *words]:
        assert word in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", ["at least one"]),
        ({"messages": HI * 5000}, "messages", ["messages: at most 4096 messages, not 5000."]),
        ({"messages": [None] * MANY}, "messages", [f"at most 4096 messages, not {MANY}."]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}]},
            "messages",
            ["messages: at most 4096 parts of a content, not 4097."],
        ),
        ({"messages": "hi"}, "messages", []),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", ["developer"]),
        ({"messages": [*HI, {"role": "user"}]}, "messages[1].content", []),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", []),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", ["600", "512"]),
        ({"messages": [{"role": "user", "content": "x" * 70_000}]}, "messages", ["70000", "512"]),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", []),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", ["tools"]),
        ({"tools": [{"type": "function"}]}, "tools", ["not supported yet"]),
        ({"tool_choice": "required"}, "tool_choice", ["not supported yet"]),
        ({"response_format": {"type": "json_object"}}, "response_format", ["not supported yet"]),
        ({"response_format": "text"}, "response_format", ["not supported yet"]),
        ({"top_logprobs": 5}, "top_logprobs", ["logprobs"]),
        ({"logprobs": 1}, "logprobs", []),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["0 to 20"]),
        ({"max_completion_tokens": 0}, "max_completion_tokens", ["at least 1"]),
        (
            {"max_completion_tokens": 513, "max_tokens": 5},
            "max_completion_tokens",
            ["513", "512"],
        ),
        ({"echo": True}, "echo", ["messages"]),
        ({"continue_final_message": True}, "continue_final_message", ["add_generation_prompt"]),
    ],
)
async def test_fields_of_chats(fields: dict[str, Any], param: str, words: list[str]) -> None:
    """What a chat alone has."""
    error = await refused("chat/completions", {"messages": HI, **fields})
    assert error["param"].startswith(param)
    for word in words:
        assert word in error["message"]


async def test_models() -> None:
    """A wrong one is not found; a missing one is the only one."""
    bench = make_bench()
    response = await post(bench, "completions", {"prompt": "x", "model": "no\0such"})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
    assert (await refused("completions", {"prompt": "x", "model": 5}))["param"] == "model"
    assert (await ask(bench, "completions", {"prompt": "x"}, {"finish": STOP})).status_code == 200


connects: list[str] = []


def watch(event: str, _: object) -> None:
    """Whatever would leave the machine."""
    if event in ("socket.connect", "socket.getaddrinfo", "urllib.Request", "open"):
        connects.append(event)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "http://localhost/"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "text"},
        {"text": "x"},
    ],
)
async def test_no_address_is_ever_followed(part: dict[str, Any]) -> None:
    """Parts that are not text are refused unread."""
    sys.addaudithook(watch)
    connects.clear()
    message = {"role": "user", "content": [{"type": "text", "text": "see"}, part]}
    error = await refused("chat/completions", {"messages": [message]})
    assert error["param"].startswith("messages")
    assert connects == []


async def test_a_large_wrong_list_costs_no_more_than_reading_it() -> None:
    """One error is found, not one for each element and each kind it might have been."""
    for body in (
        {"prompt": [None] * MANY},
        {"prompt": ["x"] * MANY},
        {"prompt": "x", "stop": [None] * MANY},
        {"prompt": "x", "stop_token_ids": ["x"] * MANY},
        {"prompt": "x", "logit_bias": {str(i): None for i in range(MANY // 8)}},
    ):
        before_s = time.process_time()
        await refused("completions", body)
        assert time.process_time() - before_s < 2


async def test_nul_is_a_character() -> None:
    """In texts; what is a name can't hold it."""
    bench = make_bench()
    body = {"prompt": "a\0b", "stop": ["\0"]}
    assert (await ask(bench, "completions", body, {"finish": STOP})).status_code == 200
    assert list(bench.queue.admitted[0].prompt_token_ids) == [97, 0, 98]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant"}, ""),
        ({"role": "developer", "content": "x", "name": "me"}, "x"),
        ({"role": "user", "content": []}, ""),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            "a\nb",
        ),
    ],
)
async def test_messages_that_look_odd_and_are_good(message: dict[str, Any], text: str) -> None:
    """As SDKs send them."""
    bench = make_bench()
    body = {"messages": [*HI, message], "tool_choice": "auto", "n": 1}
    response = await ask(bench, "chat/completions", body, {"text": "k", "finish": STOP})
    assert response.status_code == 200
    assert "".join(map(chr, bench.queue.admitted[0].prompt_token_ids)) == "hi" + text


async def test_fields_nobody_knows_are_named_in_the_log() -> None:
    """Once for each request, so many and no longer."""
    odd = {f"field_{i}": i for i in range(40)} | {"x" * 500: 1, "snow\u2603": 1}
    body = {"prompt": "x", "n": 1} | odd
    with capture_logs() as said:
        await ask(make_bench(), "completions", body, {"finish": STOP})
    [line] = [entry for entry in said if entry["event"] == "fields_ignored"]
    assert (line["num_fields"], len(line["fields"])) == (42, 16)
    assert max(map(len, line["fields"])) <= 64
    with capture_logs() as said:
        await ask(make_bench(), "completions", {"prompt": "x", "n": 1}, {"finish": STOP})
    assert not [entry for entry in said if entry["event"] == "fields_ignored"]
