"""TGI's interface, byte for byte."""

import json
from typing import Any

import httpx
import pytest

from gateway.core.types import FinishReason
from tests.unit.gateway.answering import answering
from tests.unit.gateway.fakes import Bench, make_bench
from tests.unit.gateway.test_auth import client_of

LENGTH = FinishReason.LENGTH


async def ask(
    bench: Bench, path: str, body: dict[str, Any], text: str = "ok\3", **more: Any
) -> httpx.Response:
    """Posts; the worker says `text`."""
    async with answering(bench, text, **more), client_of(bench, None) as client:
        return await client.post(f"http://127.0.0.1{path}", json=body)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Of a stream."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    return [json.loads(frame.removeprefix("data:")) for frame in frames]


async def test_a_whole_answer() -> None:
    """The text alone, where no details are asked for."""
    response = await ask(make_bench(), "/generate", {"inputs": "hi"})
    assert response.text == '{"generated_text":"ok"}'


async def test_details_and_the_full_text() -> None:
    """Each token with its logprob; the end-of-sequence token is one that has no text."""
    parameters = {"details": True, "return_full_text": True, "seed": 7}
    body = {"inputs": "hi ", "parameters": parameters}
    response = await ask(make_bench(), "/generate", body)
    assert response.json() == {
        "generated_text": "hi ok",
        "details": {
            "finish_reason": "eos_token",
            "generated_tokens": 3,
            "input_length": 3,
            "seed": 7,
            "prefill": [],
            "tokens": [
                {"id": ord("o"), "text": "o", "logprob": -0.5, "special": False},
                {"id": ord("k"), "text": "k", "logprob": -0.5, "special": False},
                {"id": 3, "text": "", "logprob": -0.5, "special": True},
            ],
        },
    }


async def test_a_stream_has_an_event_for_each_token() -> None:
    """The last one has the text, and the details if they are asked for."""
    bench = make_bench()
    body = {"inputs": "hi", "parameters": {"details": True, "max_new_tokens": 2, "seed": 1}}
    response = await ask(bench, "/generate_stream", body, "ab", reason=LENGTH)
    assert response.text == (
        'data:{"index":1,"token":{"id":97,"text":"a","logprob":-0.5,"special":false},'
        '"generated_text":null,"details":null}\n\n'
        'data:{"index":2,"token":{"id":98,"text":"b","logprob":-0.5,"special":false},'
        '"generated_text":"ab","details":{"finish_reason":"length","generated_tokens":2,'
        '"input_length":2,"seed":1}}\n\n'
    )
    plain = await ask(make_bench(), "/generate_stream", {"inputs": "hi"}, "ab", reason=LENGTH)
    assert [e["details"] for e in events(plain)] == [None, None]


async def test_texts_of_tokens_that_are_not_special_are_the_text() -> None:
    """That is how TGI's clients put it together, and how its own documents do."""
    for text in ("hello\3", "hello", "\3", "h\3", "helloé!"):
        response = await ask(
            make_bench(), "/generate_stream", {"inputs": "hi"}, text, reason=LENGTH
        )
        found = events(response)
        shown = "".join(e["token"]["text"] for e in found if not e["token"]["special"])
        assert shown == found[-1]["generated_text"] == text.rstrip("\3")


async def test_a_stop_string_ends_the_text_and_is_part_of_it() -> None:
    """As in TGI."""
    body = {"inputs": "hi", "parameters": {"stop": ["c"], "details": True}}
    answer = (await ask(make_bench(), "/generate", body, "abcd")).json()
    assert answer["generated_text"] == "abc"
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert answer["details"]["generated_tokens"] == 3


async def test_the_root_path_answers_either_way() -> None:
    """A list of one, or a stream: TGI's own clients post here."""
    whole = await ask(make_bench(), "/", {"inputs": "hi"})
    assert whole.text == '[{"generated_text":"ok"}]'
    stream = await ask(make_bench(), "/", {"inputs": "hi", "stream": True})
    assert events(stream)[-1]["generated_text"] == "ok"


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, (0.0, 1.0, 0, 100)),
        ({"do_sample": False, "temperature": 1.0, "top_p": 1.0}, (0.0, 1.0, 0, 100)),
        ({"do_sample": True}, (1.0, 1.0, 0, 100)),
        ({"temperature": 0.5}, (0.5, 1.0, 0, 100)),
        ({"top_p": 0.9, "max_new_tokens": 5}, (1.0, 0.9, 0, 5)),
        ({"top_k": 4, "temperature": 1.0}, (1.0, 1.0, 4, 100)),
    ],
)
async def test_greedy_unless_sampling_is_asked_for(
    parameters: dict[str, Any], expected: tuple[float, float, int, int]
) -> None:
    """TGI's defaults, not those of the model's files."""
    bench = make_bench()
    await ask(bench, "/generate", {"inputs": "hi", "parameters": parameters})
    sampling = bench.queue.admitted[0].sampling
    found = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens)
    assert found == expected


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
async def test_seeds_of_64_bits(seed: int) -> None:
    """TGI's have no sign."""
    bench = make_bench()
    await ask(bench, "/generate", {"inputs": "hi", "parameters": {"seed": seed}})
    assert bench.queue.admitted[0].sampling.seed == seed


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "inputs"),
        ({"inputs": 1}, "inputs"),
        ({"inputs": ["a"]}, "inputs"),
        ({"inputs": ""}, "inputs"),
        ({"inputs": "x" * 600}, "inputs"),
        ({"inputs": "x", "parameters": []}, "parameters"),
        ({"inputs": "x", "stream": 1}, "stream"),
        *(
            ({"inputs": "x", "parameters": {name: value}}, name)
            for name, value in [
                ("max_new_tokens", 0), ("max_new_tokens", 513), ("max_new_tokens", "5"),
                ("temperature", -0.1), ("temperature", 2.1), ("temperature", True),
                ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("seed", 2**64),
                ("repetition_penalty", 0), ("stop", [""]), ("stop", ["x"] * 17), ("stop", "x"),
                ("best_of", 2), ("best_of", True), ("typical_p", 0.5), ("truncate", 5),
                ("watermark", True), ("decoder_input_details", True), ("top_n_tokens", 3),
                ("grammar", {"type": "json", "value": {}}), ("adapter_id", "a"),
            ]
        ),
    ],
)  # fmt: skip
async def test_refusals_name_the_parameter(body: dict[str, Any], word: str) -> None:
    """In TGI's shape; nothing reaches the queue."""
    bench = make_bench()
    response = await ask(bench, "/generate", body)
    assert response.status_code == 400
    assert set(response.json()) == {"error", "error_type"}
    assert word in response.json()["error"]
    assert response.json()["error_type"] == "validation"
    assert bench.queue.admitted == []


async def test_an_end_that_is_an_error() -> None:
    """A status, where nothing has been said; events of errors are in test_events.py."""
    bench = make_bench()
    response = await ask(bench, "/generate_stream", {"inputs": "x"}, "", reason=FinishReason.ERROR)
    assert response.status_code == 500
    assert response.json()["error_type"] == "generation"
    whole = await ask(bench, "/generate", {"inputs": "x"}, "a", reason=FinishReason.ERROR)
    assert whole.status_code == 500
