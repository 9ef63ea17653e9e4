"""n answers to one prompt: what is queued, how their streams become choices, what ends them."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import pytest
from quire.v1 import common_pb2, inference_pb2

from gateway.core.errors import RejectReason, RequestRejected
from gateway.core.requests import RawRequest
from gateway.core.types import FinishReason, QueuedRequest
from gateway.core.validation import check
from gateway.intake import Intake, equally
from gateway.ports import Sources
from servicekit.grpc_server import channel
from tests.unit.gateway.fakes import MODEL, Bench, FakeTokenizer, make_bench, running
from tests.unit.gateway.test_engine import eventually
from tests.unit.gateway.test_grpc_limits import serving, stub_of
from tests.unit.gateway.test_rest import plain
from tests.unit.gateway.test_streams import CHAT, DONE, HI, Wire, ask, choice, settle

STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR


async def queued(**fields: Any) -> list[QueuedRequest]:
    """What a request puts into the queue."""
    bench = make_bench()
    await bench.engine.submit_all([RawRequest(**{"text": "hi"} | fields)])
    return bench.queue.admitted


async def test_samples_are_requests_of_one_group() -> None:
    """Of their own ids; prompt and seed are the same, and only the index differs."""
    found = await queued(n=3)
    assert len({request.request_id for request in found}) == 3
    assert [request.sample_index for request in found] == [0, 1, 2]
    [group] = {request.sample_group for request in found}
    assert len(group) == 16
    assert len({request.sampling.seed for request in found}) == 1
    assert [list(request.prompt_token_ids) for request in found] == [[104, 105]] * 3
    again = await queued(n=2, seed=7)
    assert {request.sampling.seed for request in again} == {7}
    assert again[0].sample_group != group


@pytest.mark.parametrize("n", [None, 1])
async def test_a_request_alone_has_no_group(n: int | None) -> None:
    """Nothing is shared with it."""
    [request] = await queued(n=n)
    assert (request.sample_group, request.sample_index) == (b"", 0)


async def test_each_prompt_of_a_list_has_its_group() -> None:
    """In the order of the choices, all of them admitted at once."""
    bench = make_bench()
    lives = await bench.engine.submit_all([RawRequest(text=text, n=2) for text in ("a", "bc")])
    found = bench.queue.admitted
    assert [live.queued for live in lives] == found
    assert [(len(r.prompt_token_ids), r.sample_index) for r in found] == [
        (1, 0), (1, 1), (2, 0), (2, 1)
    ]  # fmt: skip
    assert found[0].sample_group == found[1].sample_group != found[2].sample_group
    assert found[2].sample_group == found[3].sample_group


async def test_a_later_attempt_is_the_same_sample() -> None:
    """Or its tokens would not go on."""
    bench = make_bench()
    async with running(bench):
        lives = await bench.engine.submit_all([RawRequest(text="hi", n=2)])
        bench.say(lives[1].request_id, "ab")
        bench.say(lives[1].request_id, "x", at=5)
        await eventually(lambda: bench.queue.superseded)
    [(_, request)] = bench.queue.superseded
    first = lives[1].queued
    assert (request.attempt, list(request.output_token_ids)) == (2, [97, 98])
    assert (request.sample_group, request.sample_index) == (first.sample_group, 1)


class LongTokenizer(FakeTokenizer):
    """Every text is 8193 tokens."""

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """The same ones."""
        return range(8193)


async def test_prompts_are_counted_with_their_samples() -> None:
    """Each goes into the queue with its own: that has a bound before any is made."""
    intake = Intake(LongTokenizer(), 600.0, equally, Sources())
    checked = check(RawRequest(text="x", max_tokens=1, n=64), MODEL)
    assert len(await intake.prepare([checked], 10_000)) == 64
    with pytest.raises(RequestRejected, match="1048704 tokens, more than 1048576") as caught:
        await intake.prepare([checked, checked], 10_000)
    assert (caught.value.param, caught.value.reason) == ("n", RejectReason.INVALID)


async def test_the_stream_of_a_chat() -> None:
    """Each choice begins with its role and ends with its reason; the prompt is counted once."""
    body = {"messages": HI, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
    said = (
        {"text": "a", "of": 1, "cached": 2},
        {"text": "b"},
        {"text": "c", "at": 1, "of": 1, "finish": STOP},
        {"text": "de", "at": 1, "finish": LENGTH},
    )
    response = await ask(make_bench(), "chat/completions", body, *said)
    usage = ',"usage":null}\n\n'

    def frame(index: int, delta: str, reason: str = "null") -> str:
        fields = f'"delta":{{{delta}}},"logprobs":null,"finish_reason":{reason}'
        return choice(fields, index, CHAT)[:-3] + usage

    assert plain(response) == (
        frame(1, '"role":"assistant","content":""')
        + frame(1, '"content":"a"')
        + frame(0, '"role":"assistant","content":""')
        + frame(0, '"content":"b"')
        + frame(1, '"content":"c"')
        + frame(1, "", '"stop"')
        + frame(0, '"content":"de"')
        + frame(0, "", '"length"')
        + CHAT
        + '"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":5,"total_tokens":7,'
        + '"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
        + DONE
    )


async def test_the_stream_of_a_completion() -> None:
    """Stop strings end their own choice, which the worker is told; the other goes on."""
    bench = make_bench()
    body = {"prompt": "hi", "stream": True, "n": 2, "stop": "x"}
    said = (
        {"text": "ax"},
        {"text": "b", "of": 1},
        {"text": "more", "at": 2},
        {"text": "c", "at": 1, "of": 1, "finish": LENGTH},
    )
    response = await ask(bench, "completions", body, *said)
    rest = '"logprobs":null,"finish_reason":'
    assert plain(response) == (
        choice(f'"text":"a",{rest}null', 0)
        + choice(f'"text":"",{rest}"stop"', 0)
        + choice(f'"text":"b",{rest}null', 1)
        + choice(f'"text":"c",{rest}null', 1)
        + choice(f'"text":"",{rest}"length"', 1)
        + DONE
    )
    assert bench.link.cancelled[0] == bench.queue.admitted[0].request_id
    assert bench.queue.admitted[1].request_id not in bench.link.cancelled


async def test_a_whole_answer_to_several_prompts() -> None:
    """Choices by prompt and sample; each prompt is counted once, and what the cache held of it."""
    said = [
        {"text": text, "finish": STOP, "of": number, "cached": cached}
        for number, text, cached in ((3, "dd", 2), (0, "a", 1), (2, "c", 1), (1, "b", 1))
    ]
    body = {"prompt": ["x", "yz"], "n": 2, "best_of": 2}
    response = await ask(make_bench(), "completions", body, *said)
    found = response.json()
    assert [(c["index"], c["text"]) for c in found["choices"]] == [
        (0, "a"), (1, "b"), (2, "c"), (3, "dd")
    ]  # fmt: skip
    assert found["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_the_first_that_fails_ends_all() -> None:
    """As with several prompts."""
    bench = make_bench()
    said = {"text": "a"}, {"reason": FinishReason.UNAVAILABLE, "message": "Nobody.", "of": 1}
    response = await ask(bench, "completions", {"prompt": "x", "n": 3, "stream": True}, *said)
    assert plain(response).endswith('"code":"service_unavailable"}}\n\n' + DONE)
    ids = [request.request_id for request in bench.queue.admitted]
    assert (bench.link.cancelled, bench.fleet.cancelled) == ([ids[0]], [ids[2]])
    whole = await ask(make_bench(), "completions", {"prompt": "x", "n": 2}, *said)
    assert whole.status_code == 503


async def test_a_client_that_leaves_ends_all() -> None:
    """Those that run and those that wait."""
    bench = make_bench()
    wire = Wire(bench, {"prompt": "x", "stream": True, "n": 3})
    ids = [(await bench.queue.arrivals.get()).request_id for _ in range(3)]
    bench.say(ids[1], "a")
    await settle()
    wire.leave()
    await wire.task
    assert bench.engine.num_live == 0
    assert bench.link.cancelled == [ids[1]]
    assert bench.queue.cancelled == [ids[0], ids[2]]


@pytest.fixture
async def stub() -> AsyncIterator[tuple[Bench, Any]]:
    """A bench and its gRPC service."""
    bench = make_bench()
    async with serving(bench) as address, channel(address) as found:
        yield bench, stub_of(found)


async def rest_of(call: Any) -> list[inference_pb2.GenerateResponse]:
    """All events that are still to come."""
    found = []
    while (event := await call.read()) is not grpc.aio.EOF:
        found.append(event)
    return found


async def admitted(bench: Bench, count: int) -> list[QueuedRequest]:
    """So many requests, once they are there."""
    async with asyncio.timeout(20):
        return [await bench.queue.arrivals.get() for _ in range(count)]


async def test_grpc(stub: tuple[Bench, Any]) -> None:
    """Each event says of which sample it is; the last has the usage, the prompt comes back once."""
    bench, service = stub
    call = service.Generate(inference_pb2.GenerateRequest(text="hi", n=2, echo=True))
    requests = await admitted(bench, 2)
    bench.say(requests[1].request_id, "b", finish=STOP)
    events = [await call.read() for _ in range(4)]
    bench.say(requests[0].request_id, "aa", finish=LENGTH)
    events += await rest_of(call)
    started, echo, *rest = events
    assert started.started.request_id == requests[0].request_id.hex()
    assert (echo.echo.text, list(echo.echo.token_ids)) == ("hi", [104, 105])
    told = [(e.sample_index, e.delta.text, e.finished.finish_reason) for e in rest]
    assert told == [(1, "b", 0), (1, "", STOP), (0, "aa", 0), (0, "", LENGTH)]
    assert [e.finished.HasField("usage") for e in rest] == [False, False, False, True]
    assert rest[-1].finished.usage == common_pb2.Usage(prompt_tokens=2, completion_tokens=3)


async def test_grpc_ends_with_the_first_that_fails(stub: tuple[Bench, Any]) -> None:
    """Finished says which."""
    bench, service = stub
    call = service.Generate(inference_pb2.GenerateRequest(text="hi", n=2))
    requests = await admitted(bench, 2)
    bench.notify(requests[1].request_id, FinishReason.DEADLINE, "Too late.")
    *_, last = await rest_of(call)
    assert (last.sample_index, last.finished.message) == (1, "Too late.")
    assert last.finished.usage.prompt_tokens == 2
    assert bench.queue.cancelled == [requests[0].request_id]


async def test_a_call_is_cancelled_by_the_id_that_started_gave(stub: tuple[Bench, Any]) -> None:
    """All its samples, also when the first one has ended."""
    bench, service = stub
    call = service.Generate(inference_pb2.GenerateRequest(text="hi", n=3))
    requests = await admitted(bench, 3)
    started = (await call.read()).started
    bench.say(requests[0].request_id, "a", finish=STOP)
    for _ in range(2):
        await call.read()
    cancel = inference_pb2.CancelRequest(request_id=started.request_id)
    assert (await service.Cancel(cancel)).found
    assert not (await service.Cancel(cancel)).found
    [last] = await rest_of(call)
    assert last.finished.finish_reason == common_pb2.FINISH_REASON_CANCELLED
    assert bench.engine.num_live == 0
    assert set(bench.queue.cancelled) == {requests[1].request_id, requests[2].request_id}


async def test_a_client_that_leaves_a_call(stub: tuple[Bench, Any]) -> None:
    """Over gRPC."""
    bench, service = stub
    call = service.Generate(inference_pb2.GenerateRequest(text="hi", n=2))
    requests = await admitted(bench, 2)
    await call.read()
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED
    await eventually(lambda: bench.engine.num_live == 0)
    assert set(bench.queue.cancelled) == {request.request_id for request in requests}


async def test_echoes_and_logprobs_are_each_choices_own() -> None:
    """As n requests would have them."""
    body = {"prompt": "ab", "n": 2, "echo": True, "logprobs": 1, "max_tokens": 1}
    said = [
        {"text": text, "num_top": 1, "prompt_len": 2, "finish": LENGTH, "of": number}
        for number, text in enumerate("cd")
    ]
    found = (await ask(make_bench(), "completions", body, *said)).json()["choices"]
    assert [c["text"] for c in found] == ["abc", "abd"]
    assert [c["logprobs"]["tokens"] for c in found] == [["a", "b", "c"], ["a", "b", "d"]]
    assert [json.dumps(c["logprobs"]["text_offset"]) for c in found] == ["[0, 1, 2]"] * 2
