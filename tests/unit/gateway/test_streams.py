"""Streams of OpenAI's interfaces, byte for byte; their silence, their errors, their clients' end.

What streams of plain text look like stands in test_rest.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from gateway.core.types import FinishReason
from gateway.rest import answer, live_answer
from tests.unit.gateway.fakes import Bench, make_bench
from tests.unit.gateway.test_rest import client_of, plain
from tests.virtual_time import in_virtual_time

STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR
HI = [{"role": "user", "content": "hi"}]
COMPLETION = 'data: {"id":"cmpl-ID","object":"text_completion","created":0,"model":"tiny",'
CHAT = 'data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"tiny",'
DONE = "data: [DONE]\n\n"


async def settle() -> None:
    """Lets every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def say(bench: Bench, ids: Sequence[bytes], said: dict[str, Any]) -> None:
    """The worker of one of a call's requests, or the scheduler."""
    said = dict(said)
    request_id: Any = ids[said.pop("of", 0)]
    if "reason" in said:
        bench.notify(request_id, said["reason"], said.get("message", ""))
    else:
        bench.say(request_id, **said)
    await settle()


async def ask(bench: Bench, path: str, body: dict[str, Any], *said: dict[str, Any]) -> Any:
    """Posts; `of` says whose tokens they are where there are several prompts."""
    async with client_of(bench) as client:
        loop = asyncio.get_running_loop()
        task = loop.create_task(client.post(f"/v1/{path}", json=body))
        arrival = loop.create_task(bench.queue.arrivals.get())
        await asyncio.wait([task, arrival], return_when=asyncio.FIRST_COMPLETED)
        assert arrival.done(), (await task).text
        await settle()
        ids = [request.request_id for request in bench.queue.admitted]
        for what in said:
            await say(bench, ids, what)
        response: httpx.Response = await task
    assert bench.engine.num_live == 0
    return response


def choice(fields: str, index: int = 0, start: str = COMPLETION) -> str:
    """A frame with one choice, and nothing behind it."""
    return f'{start}"choices":[{{"index":{index},{fields}}}]}}\n\n'


async def test_a_chat_with_logprobs() -> None:
    """In the frame of their text; tokens without text bring theirs, too."""
    body = {"messages": HI, "stream": True, "logprobs": True, "top_logprobs": 1}
    said = {"text": "é", "num_top": 1}, {"text": "\3", "at": 1, "num_top": 1, "finish": STOP}
    response = await ask(make_bench(), "chat/completions", body, *said)
    entry = '{"token":"é","logprob":-0.5,"bytes":[195,169]'
    end = '{"token":"<3>","logprob":-0.5,"bytes":[60,51,62]'
    assert plain(response) == (
        choice(
            '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null',
            start=CHAT,
        )
        + choice(
            f'"delta":{{"content":"é"}},"logprobs":{{"content":[{entry},'
            f'"top_logprobs":[{entry}}}]}}],"refusal":null}},"finish_reason":null',
            start=CHAT,
        )
        + choice(
            f'"delta":{{"content":""}},"logprobs":{{"content":[{end},'
            f'"top_logprobs":[{end}}}]}}],"refusal":null}},"finish_reason":null',
            start=CHAT,
        )
        + choice('"delta":{},"logprobs":null,"finish_reason":"stop"', start=CHAT)
        + DONE
    )


@pytest.mark.parametrize("many", [1, answer.MANY_LOGPROBS])
async def test_an_echo_with_logprobs(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's frame comes with the first output; that of a long one is written in a thread."""
    monkeypatch.setattr(answer, "MANY_LOGPROBS", many)
    body = {"prompt": "ab", "stream": True, "logprobs": 1, "echo": True, "max_tokens": 1}
    said = {"text": "c", "num_top": 1, "prompt_len": 2, "finish": LENGTH}
    response = await ask(make_bench(), "completions", body, said)
    assert plain(response) == (
        choice(
            '"text":"ab","logprobs":{"text_offset":[0,1],"token_logprobs":[null,-0.5],'
            '"tokens":["a","b"],"top_logprobs":[null,{"p":-0.5,"b":-0.5}]},"finish_reason":null'
        )
        + choice(
            '"text":"c","logprobs":{"text_offset":[2],"token_logprobs":[-0.5],'
            '"tokens":["c"],"top_logprobs":[{"c":-0.5}]},"finish_reason":null'
        )
        + choice('"text":"","logprobs":null,"finish_reason":"length"')
        + DONE
    )


async def test_an_echo_of_token_ids() -> None:
    """Their text, and the ids where they are asked for."""
    body = {"prompt": [97, 98], "stream": True, "echo": True, "return_token_ids": True}
    response = await ask(make_bench(), "completions", body, {"text": "c", "finish": STOP})
    assert plain(response) == (
        choice('"text":"ab","logprobs":null,"finish_reason":null,"prompt_token_ids":[97,98]')
        + choice('"text":"c","logprobs":null,"finish_reason":null,"token_ids":[99]')
        + choice('"text":"","logprobs":null,"finish_reason":"stop"')
        + DONE
    )


async def test_a_prompt_alone() -> None:
    """max_tokens 0: the token that was computed is not shown."""
    body = {"prompt": "ab", "stream": True, "echo": True, "max_tokens": 0}
    response = await ask(make_bench(), "completions", body, {"text": "c", "finish": LENGTH})
    assert plain(response) == (
        choice('"text":"ab","logprobs":null,"finish_reason":null')
        + choice('"text":"","logprobs":null,"finish_reason":"length"')
        + DONE
    )


async def test_several_prompts() -> None:
    """Their frames come as their tokens do, each with its index; one usage at the end."""
    body = {
        "prompt": ["a", "bc"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    said = (
        {"of": 1, "text": "x", "cached": 1},
        {"of": 0, "text": "y"},
        {"of": 1, "text": "z", "at": 1, "finish": STOP},
        {"of": 0, "text": "!", "at": 1, "finish": LENGTH},
    )
    response = await ask(make_bench(), "completions", body, *said)

    def frame(index: int, text: str, reason: str = "null") -> str:
        fields = f'"text":"{text}","logprobs":null,"finish_reason":{reason}'
        return choice(fields, index).replace("}]}", '}],"usage":null}')

    assert plain(response) == (
        frame(1, "x")
        + frame(0, "y")
        + frame(1, "z")
        + frame(1, "", '"stop"')
        + frame(0, "!")
        + frame(0, "", '"length"')
        + COMPLETION
        + '"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7,'
        '"prompt_tokens_details":{"cached_tokens":1}}}\n\n' + DONE
    )


async def test_usage_in_every_frame() -> None:
    """As of that frame."""
    body = {
        "messages": HI,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    said = {"text": "a"}, {"text": "bc", "at": 1, "finish": STOP}
    response = await ask(make_bench(), "chat/completions", body, *said)
    usages = [
        json.loads(line[6:])["usage"]["completion_tokens"]
        for line in response.text.splitlines()
        if line and line != "data: [DONE]"
    ]
    assert usages == [1, 1, 3, 3, 3]


async def test_the_first_of_several_prompts_that_fails_ends_the_answer() -> None:
    """An event; the others are cancelled, and nothing of them follows."""
    bench = make_bench()
    body = {"prompt": ["a", "b", "c"], "stream": True}
    said = (
        {"of": 0, "text": "x"},
        {"of": 1, "reason": ERROR, "message": "It broke."},
        {"of": 2, "text": "y"},
    )
    response = await ask(bench, "completions", body, *said)
    assert plain(response) == (
        choice('"text":"x","logprobs":null,"finish_reason":null')
        + 'data: {"error":{"message":"It broke.","type":"server_error","param":null,'
        '"code":"request_failed"}}\n\n' + DONE
    )
    first, _, third = (request.request_id for request in bench.queue.admitted)
    assert set(bench.link.cancelled + bench.queue.cancelled) == {first, third}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_all_output_has_a_status(stream: bool) -> None:
    """Of several prompts as of one."""
    bench = make_bench()
    body = {"prompt": ["a", "b"], "stream": stream}
    said = {"of": 1, "reason": FinishReason.DEADLINE, "message": "Too late."}
    response = await ask(bench, "completions", body, said)
    assert (response.status_code, response.json()["error"]["message"]) == (504, "Too late.")
    assert bench.queue.cancelled == [bench.queue.admitted[0].request_id]


async def test_whole_answers() -> None:
    """Choices in the order of the prompts, whatever ends first; logprobs and echo in each."""
    body = {"prompt": ["ab", "c"], "logprobs": 0, "echo": True, "max_tokens": 1}
    said = (
        {"of": 1, "text": "x", "num_top": 0, "prompt_len": 1, "finish": LENGTH},
        {"of": 0, "text": "y", "num_top": 0, "prompt_len": 2, "finish": STOP},
    )
    response = await ask(make_bench(), "completions", body, *said)
    answered = response.json()
    assert answered["choices"] == [
        {
            "index": 0,
            "text": "aby",
            "logprobs": {
                "text_offset": [0, 1, 2],
                "token_logprobs": [None, -0.5, -0.5],
                "tokens": ["a", "b", "y"],
                "top_logprobs": [None, {"b": -0.5}, {"y": -0.5}],
            },
            "finish_reason": "stop",
        },
        {
            "index": 1,
            "text": "cx",
            "logprobs": {
                "text_offset": [0, 1],
                "token_logprobs": [None, -0.5],
                "tokens": ["c", "x"],
                "top_logprobs": [None, {"x": -0.5}],
            },
            "finish_reason": "length",
        },
    ]
    assert answered["usage"]["total_tokens"] == 5


async def test_a_long_body_of_logprobs() -> None:
    """Written in a thread; the same body."""
    text = "a" * (answer.MANY_LOGPROBS + 1)
    body = {"messages": HI, "logprobs": True}
    bench = make_bench(buffer_tokens=10**6)
    said = {"text": text, "num_top": 0, "finish": STOP}
    response = await ask(bench, "chat/completions", body, said)
    [found] = response.json()["choices"]
    assert found["message"]["content"] == text
    assert len(found["logprobs"]["content"]) == len(text)


class Wire:
    """A client at the ASGI application itself, who sees each message when it is sent."""

    def __init__(self, bench: Bench, body: dict[str, Any]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._gone = asyncio.Event()
        self._data = json.dumps(body).encode()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        self._app = client_of(bench)._transport.app  # type: ignore[attr-defined]
        call = self._app(scope, self._receive, self._send)
        self.task = asyncio.get_running_loop().create_task(call)

    async def _receive(self) -> dict[str, Any]:
        if self._data:
            data, self._data = self._data, b""
            return {"type": "http.request", "body": data, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.gate.wait()
        self.messages.append(message)

    def leave(self) -> None:
        """The connection is closed."""
        self._gone.set()

    @property
    def text(self) -> str:
        """All of the body so far."""
        data = b"".join(m.get("body", b"") for m in self.messages)
        return re.sub(
            r'"created":\d+', '"created":0', re.sub(r"cmpl-\w+", "cmpl-ID", data.decode())
        )


@in_virtual_time
async def test_silence() -> None:
    """Headers go out after a while, then comments; an error is an event then, whatever its kind."""
    bench = make_bench()
    wire = Wire(bench, {"prompt": "x", "stream": True})
    request = await bench.queue.arrivals.get()
    await asyncio.sleep(live_answer.STATUS_WAIT_S - 1)
    assert wire.messages == []
    await asyncio.sleep(2)
    assert [m["type"] for m in wire.messages] == ["http.response.start"]
    assert wire.messages[0]["status"] == 200
    await asyncio.sleep(2 * live_answer.KEEP_ALIVE_S)
    assert wire.text == ": keep-alive\n\n" * 2
    bench.say(request.request_id, "a")
    await settle()
    assert wire.text.endswith(
        ": keep-alive\n\n" + choice('"text":"a","logprobs":null,"finish_reason":null')
    )
    await asyncio.sleep(live_answer.KEEP_ALIVE_S + 1)
    assert wire.text.endswith("}\n\n: keep-alive\n\n")
    bench.notify(request.request_id, FinishReason.UNAVAILABLE, "Nobody is there.")
    await wire.task
    assert wire.text.endswith(
        'data: {"error":{"message":"Nobody is there.","type":"service_unavailable_error",'
        '"param":null,"code":"service_unavailable"}}\n\n' + DONE
    )
    assert wire.messages[-1]["more_body"] is False
    count = len(wire.messages)
    await asyncio.sleep(2 * live_answer.KEEP_ALIVE_S)
    assert len(wire.messages) == count


@in_virtual_time
async def test_a_stream_that_speaks_has_no_comments() -> None:
    """Every frame begins the wait anew."""
    bench = make_bench()
    wire = Wire(bench, {"prompt": "x", "stream": True, "max_tokens": 99})
    request = await bench.queue.arrivals.get()
    for at in range(10):
        bench.say(request.request_id, "a", at=at, finish=STOP if at == 9 else 0)  # type: ignore[arg-type]
        await asyncio.sleep(live_answer.KEEP_ALIVE_S / 2)
    await wire.task
    assert "keep-alive" not in wire.text


async def test_frames_leave_within_the_call_that_brings_their_tokens() -> None:
    """No task runs in between, until the client is behind; then nothing is lost or overtaken."""
    bench = make_bench()
    wire = Wire(bench, {"prompt": "x", "stream": True, "max_tokens": 99})
    request = await bench.queue.arrivals.get()
    bench.say(request.request_id, "a")
    await settle()
    bench.say(request.request_id, "b", at=1)
    bench.say(request.request_id, "c", at=2)
    assert re.findall(r'"text":"(\w*)"', wire.text) == ["a", "b", "c"]
    wire.gate.clear()
    bench.say(request.request_id, "d", at=3)
    bench.say(request.request_id, "e", at=4)
    await settle()
    bench.say(request.request_id, "f", at=5)
    assert re.findall(r'"text":"(\w*)"', wire.text) == ["a", "b", "c"]
    wire.gate.set()
    await settle()
    bench.say(request.request_id, "g", at=6)
    assert re.findall(r'"text":"(\w*)"', wire.text) == ["a", "b", "c", "d", "ef", "g"]
    bench.say(request.request_id, at=7, finish=STOP)
    await wire.task
    assert wire.text.endswith(DONE)


async def test_a_client_that_does_not_read() -> None:
    """Its stream ends with a reason of its own, which stands behind what it has missed."""
    bench = make_bench(buffer_tokens=4)
    wire = Wire(bench, {"prompt": "x", "stream": True, "max_tokens": 99})
    request = await bench.queue.arrivals.get()
    bench.say(request.request_id, "a")
    await settle()
    wire.gate.clear()
    for at in range(1, 9):
        bench.say(request.request_id, "b", at=at)
        await settle()
    assert set(bench.link.cancelled) == {request.request_id}
    wire.gate.set()
    await wire.task
    assert '"text":"bbbb' in wire.text
    assert wire.text.endswith(DONE)
    assert '"code":"slow_reader"' in wire.text
    assert "tokens were waiting" in wire.text


@pytest.mark.parametrize("what", ["frame", "last frame", "comment"])
@in_virtual_time
async def test_a_client_that_takes_nothing(what: str) -> None:
    """Is given up, whatever it is that it does not take."""
    bench = make_bench()
    wire = Wire(bench, {"prompt": "x", "stream": True, "max_tokens": 99})
    request = await bench.queue.arrivals.get()
    bench.say(request.request_id, "a")
    await settle()
    wire.gate.clear()
    if what != "comment":
        last = STOP if what == "last frame" else FinishReason.UNSPECIFIED
        bench.say(request.request_id, "b", at=1, finish=last)
    async with asyncio.timeout(live_answer.KEEP_ALIVE_S + live_answer.SEND_TIMEOUT_S + 1):
        await wire.task
    assert "DONE" not in wire.text
    assert bench.engine.num_live == 0
    assert set(bench.link.cancelled) == (set() if what == "last frame" else {request.request_id})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("output", [False, True])
async def test_a_client_that_leaves(stream: bool, output: bool) -> None:
    """All its requests end at once, before or after their first token."""
    bench = make_bench()
    wire = Wire(bench, {"prompt": ["a", "b"], "stream": stream})
    ids = [(await bench.queue.arrivals.get()).request_id for _ in range(2)]
    if output:
        for request_id in ids:
            bench.say(request_id, "x")
    await settle()
    wire.leave()
    await wire.task
    assert bench.engine.num_live == 0
    assert set(bench.link.cancelled if output else bench.queue.cancelled) == set(ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_exception_in_one_of_several_prompts(stream: bool) -> None:
    """Ends the answer in our own words; the other does not wait for ever."""

    class Broken:
        def push(self, *_: object) -> None:
            raise KeyError("secret")

    bench = make_bench()
    wire = Wire(bench, {"prompt": ["a", "b"], "stream": stream})
    ids = [(await bench.queue.arrivals.get()).request_id for _ in range(2)]
    bench.engine._live[ids[1]].assembler = Broken()  # type: ignore[assignment]
    bench.say(ids[1], "x")
    await wire.task
    assert (wire.messages[0]["status"], "secret" in wire.text) == (500, False)
    assert "The gateway failed on this request." in wire.text
    assert bench.engine.num_live == 0
    assert bench.link.cancelled == [ids[1]]
    assert bench.metric("vllm:request_success_total", finished_reason="error") == 1
