"""The Open Inference Protocol over REST and gRPC: one request, one answer, one verdict."""

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.oip import open_inference_pb2 as pb
from quire.oip import open_inference_pb2_grpc

from gateway import oip_codec
from gateway.core.errors import QueueFullError, RequestRejected
from gateway.core.types import FinishReason
from gateway.oip_service import SERVICE_NAME, OpenInferenceService
from gateway.rest.bodies import parse
from gateway.rest.oip import InferBody
from servicekit.grpc_server import Server, channel
from tests.unit.gateway.answering import answer, answering
from tests.unit.gateway.fakes import Bench, make_bench
from tests.unit.gateway.test_auth import client_of

URL = "http://127.0.0.1/v2"
MODEL = f"{URL}/models/tiny"


def packed(*texts: bytes) -> bytes:
    """BYTES elements in the protocol's raw form."""
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def infer_request(text: str = "hi", **parameters: Any) -> pb.ModelInferRequest:
    """As Triton's client writes it."""
    request = pb.ModelInferRequest(model_name="tiny", id="mine")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(packed(text.encode()))
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in parameters.items():
        setattr(request.parameters[name], kinds[type(value)], value)
    return request


@contextlib.asynccontextmanager
async def serving(bench: Bench) -> AsyncIterator[Any]:
    """A stub of the service."""

    def register(server: grpc.aio.Server) -> None:
        add: Any = open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server
        add(OpenInferenceService(bench.engine), server)

    server = Server(register, [SERVICE_NAME])
    port = await server.start("127.0.0.1", 0)
    async with channel(f"127.0.0.1:{port}") as found, asyncio.timeout(40):
        yield open_inference_pb2_grpc.GRPCInferenceServiceStub(found)  # type: ignore[no-untyped-call]
    await server.stop(0)


# What is served.


async def test_health_and_metadata_over_rest() -> None:
    """Before a worker is there, and with one."""
    bench = make_bench()
    bench.fleet.usable = False
    async with client_of(bench, None) as client:
        assert (await client.get(f"{URL}/health/live")).json() == {"live": True}
        for path, said in (("health/ready", {}), ("models/tiny/ready", {"name": "tiny"})):
            for usable, status in ((False, 503), (True, 200)):
                bench.fleet.usable = usable
                response = await client.get(f"{URL}/{path}")
                assert response.status_code == status
                assert response.json() == said | {"ready": usable}
        server = (await client.get(URL)).json()
        assert (server["name"], server["extensions"]) == ("quire", [])
        model = (await client.get(MODEL)).json()
        assert model["outputs"] == [{"name": "text_output", "datatype": "BYTES", "shape": [1]}]
        assert model["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [1]}
        missing = await client.get(f"{URL}/models/other")
        assert missing.status_code == 404
        assert set(missing.json()) == {"error"}


@pytest.mark.parametrize("path", ["nothing", "models/tiny/nothing", "models/%0a/ready"])
async def test_what_is_not_there_is_said_in_the_protocol_s_shape(path: str) -> None:
    """Also where no route was found."""
    async with client_of(make_bench(), None) as client:
        response = await client.get(f"{URL}/{path}")
    assert response.status_code == 404
    assert set(response.json()) == {"error"}
    assert isinstance(response.json()["error"], str)


async def test_health_and_metadata_over_grpc() -> None:
    """The same."""
    bench = make_bench()
    async with serving(bench) as stub:
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="tiny", version="1"))).ready
        assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).name == "quire"
        model = await stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"))
        assert [(t.name, t.datatype, list(t.shape)) for t in model.outputs] == [
            ("text_output", "BYTES", [1])
        ]
        bench.fleet.usable = False
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
        for name, version in (("other", ""), ("tiny", "2"), ("", "")):
            for call in (stub.ModelReady, stub.ModelMetadata):
                kind = pb.ModelReadyRequest if call is stub.ModelReady else pb.ModelMetadataRequest
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(kind(name=name, version=version))
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND


# Answers.


async def test_infer_over_rest() -> None:
    """A tensor for a tensor; parameters beside it or as tensors of their own."""
    bench = make_bench()
    body = {
        "id": "mine",
        "parameters": {"max_tokens": 5, "temperature": 0},
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [["hi"]]},
            {"name": "top_k", "datatype": "INT32", "shape": [1], "data": [7]},
            {"name": "stop", "datatype": "BYTES", "shape": [2], "data": ["x", "y"]},
        ],
        "outputs": [{"name": "text_output"}],
    }
    async with answering(bench, "ok\3"), client_of(bench, None) as client:
        response = await client.post(f"{MODEL}/infer", json=body)
    assert response.json() == {
        "model_name": "tiny",
        "model_version": "1",
        "id": "mine",
        "parameters": {"finish_reason": "stop", "prompt_tokens": 2, "completion_tokens": 3},
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["ok"]}],
    }
    sampling = bench.queue.admitted[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (5, 0.0, 7)


async def test_infer_over_grpc() -> None:
    """The text comes back as raw bytes, as Triton's clients read it."""
    bench = make_bench()
    async with answering(bench, "oké\3"), serving(bench) as stub:
        response = await stub.ModelInfer(infer_request(max_tokens=5, temperature=0.5, seed=9))
    assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "mine")
    assert [(o.name, o.datatype, list(o.shape)) for o in response.outputs] == [
        ("text_output", "BYTES", [1])
    ]
    assert list(response.raw_output_contents) == [packed("oké".encode())]
    assert response.parameters["finish_reason"].string_param == "stop"
    assert response.parameters["completion_tokens"].int64_param == 4
    sampling = bench.queue.admitted[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (5, 0.5, 9)


async def test_generate() -> None:
    """Parameters stand inside, or beside the text as Triton has them; the inner ones win."""
    bench = make_bench()
    body = {"text_input": "hi", "max_tokens": 4, "top_k": 2, "parameters": {"max_tokens": 5}}
    async with answering(bench, "ok\3"), client_of(bench, None) as client:
        response = await client.post(f"{MODEL}/generate", json=body)
    assert response.text == (
        '{"model_name":"tiny","model_version":"1","text_output":"ok","finish_reason":"stop",'
        '"prompt_tokens":2,"completion_tokens":3}'
    )
    sampling = bench.queue.admitted[0].sampling
    assert (sampling.max_tokens, sampling.top_k) == (5, 2)


async def test_generate_stream() -> None:
    """An event for each piece; the last one says why it ended."""
    bench = make_bench()
    async with client_of(bench, None) as client:
        post = client.post(f"{MODEL}/generate_stream", json={"text_input": "hi", "id": "mine"})
        task = asyncio.get_running_loop().create_task(post)
        request = await bench.queue.arrivals.get()
        for at, (text, finish) in enumerate([("o", 0), ("k", 0), ("\3", 1)]):
            bench.say(request.request_id, text, at=at, finish=FinishReason(finish))
            for _ in range(10):
                await asyncio.sleep(0)
        response = await task
    start = 'data: {"model_name":"tiny","model_version":"1","id":"mine","text_output":'
    assert response.text == (
        start + '"o"}\n\n' + start + '"k"}\n\n' + start + '"","finish_reason":"stop",'
        '"prompt_tokens":2,"completion_tokens":3}\n\n'
    )


async def test_streams_over_grpc_run_side_by_side() -> None:
    """Told apart by id, each ended by its mark; an error ends its own answer only."""
    bench = make_bench()
    async with serving(bench) as stub:
        call = stub.ModelStreamInfer()
        for name in ("first", "second"):
            request = infer_request(name)
            request.id = name
            await call.write(request)
        wrong = infer_request("x", max_tokens=0)
        wrong.id = "wrong"
        await call.write(wrong)
        refused = await call.read()
        assert "max_tokens" in refused.error_message
        assert refused.infer_response.id == "wrong"
        found = [await bench.queue.arrivals.get() for _ in range(2)]
        by_text = {"".join(map(chr, r.prompt_token_ids)): r for r in found}
        bench.say(by_text["second"].request_id, "b")
        piece = (await call.read()).infer_response
        assert (piece.id, piece.raw_output_contents[0]) == ("second", packed(b"b"))
        assert not piece.parameters["triton_final_response"].bool_param
        answer(bench, by_text["first"], "a\3")
        last = (await call.read()).infer_response
        assert (last.id, last.raw_output_contents[0]) == ("first", packed(b"a"))
        assert last.parameters["triton_final_response"].bool_param
        bench.notify(by_text["second"].request_id, FinishReason.DEADLINE, "Too late.")
        failed = await call.read()
        assert (failed.error_message, failed.infer_response.id) == ("Too late.", "second")
        assert failed.infer_response.parameters["triton_final_response"].bool_param
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_a_client_that_leaves_a_stream_ends_all_its_requests() -> None:
    """And one that leaves a call its one."""
    bench = make_bench()
    async with serving(bench) as stub:
        call = stub.ModelStreamInfer()
        for _ in range(3):
            await call.write(infer_request())
            await bench.queue.arrivals.get()
        single = stub.ModelInfer(infer_request())
        await bench.queue.arrivals.get()
        assert bench.engine.num_live == 4
        call.cancel()
        single.cancel()
        while bench.engine.num_live:  # noqa: ASYNC110 (it ends in no time)
            await asyncio.sleep(0.01)
    assert len(bench.queue.cancelled) == 4


async def test_statuses_of_what_is_not_served() -> None:
    """With the time after which to try again."""
    bench = make_bench()
    async with serving(bench) as stub:
        bench.queue.error = QueueFullError("full", retry_after_s=7)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(infer_request())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(caught.value.trailing_metadata())["retry-after"] == "7"
        bench.queue.error = None
        async with answering(bench, "", FinishReason.ERROR):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ModelInfer(infer_request())
        assert caught.value.code() is grpc.StatusCode.INTERNAL


# Refusals.

TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "inputs"),
        ({"inputs": []}, "text_input"),
        ({"inputs": [TEXT, TEXT]}, "more than once"),
        ({"inputs": [TEXT | {"datatype": "FP32", "data": [1.0]}]}, "must be BYTES"),
        ({"inputs": [TEXT | {"datatype": "TEXT"}]}, "data type"),
        ({"inputs": [TEXT | {"shape": [2]}]}, "do not fit"),
        ({"inputs": [TEXT | {"shape": []}]}, "do not fit"),
        ({"inputs": [TEXT | {"shape": [-1]}]}, "dimension"),
        ({"inputs": [TEXT | {"shape": [2**40, 2**40]}]}, "dimension"),
        ({"inputs": [TEXT | {"data": ["a", "b"], "shape": [2]}]}, "one element"),
        ({"inputs": [TEXT | {"data": [1]}]}, "string"),
        ({"inputs": [TEXT | {"data": [["x"] * 600] * 3}]}, "at most 1024"),
        ({"inputs": [TEXT | {"data": [[[]] * 600] * 3}]}, "at most 1024"),
        ({"inputs": [TEXT] * 65}, "inputs"),
        ({"inputs": [TEXT], "outputs": [{"name": "logits"}]}, "logits"),
        ({"inputs": [TEXT], "parameters": {"max_tokens": "5"}}, "max_tokens"),
        ({"inputs": [TEXT], "parameters": {"max_tokens": 0}}, "max_tokens"),
        ({"inputs": [TEXT], "parameters": {"n": 2}}, "n is not supported"),
        ({"inputs": [TEXT], "id": "x" * 129}, "id"),
        ({"inputs": [TEXT, {**TEXT, "name": "top_k", "data": ["5"]}]}, "top_k"),
    ],
)
async def test_refused_tensors_over_rest(body: dict[str, Any], word: str) -> None:
    """400 in the protocol's shape, naming the tensor or the parameter."""
    bench = make_bench()
    async with client_of(bench, None) as client:
        response = await client.post(f"{MODEL}/infer", json=body)
    assert response.status_code == 400
    assert set(response.json()) == {"error"}
    assert word in response.json()["error"]
    assert bench.queue.admitted == []


def tensor(name: str = "text_input", datatype: str = "BYTES", **more: Any) -> dict[str, Any]:
    """An input tensor."""
    return {"name": name, "datatype": datatype, "shape": [1], **more}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "text_input"),
        ({"inputs": [tensor()]}, "0 elements"),
        ({"inputs": [tensor()], "raw_input_contents": [b"\5\0\0\0x"]}, "shorter"),
        ({"inputs": [tensor()], "raw_input_contents": [b"\1\0"]}, "cut off"),
        ({"inputs": [tensor()], "raw_input_contents": [b"\xff\xff\xff\xff"]}, "shorter"),
        ({"inputs": [tensor()], "raw_input_contents": [packed(b"\xff")]}, "UTF-8"),
        ({"inputs": [tensor()], "raw_input_contents": [b"\0\0\0\0" * 1025]}, "at most 1024"),
        ({"inputs": [tensor()], "raw_input_contents": [packed(b"x")] * 2}, "2 contents"),
        (
            {
                "inputs": [tensor(contents={"bytes_contents": [b"x"]})],
                "raw_input_contents": [packed(b"x")],
            },
            "both",
        ),
        ({"inputs": [tensor(), tensor("top_k", "INT32")],
          "raw_input_contents": [packed(b"x"), b"\1\0\0"]}, "no list of INT32"),
        ({"inputs": [tensor(), tensor("top_k", "INT32")],
          "raw_input_contents": [packed(b"x"), b"\1\0\0\0" * 2]}, "2 elements"),
        ({"inputs": [tensor()] * 65}, "at most 64"),
        ({"outputs": [{"name": "logits"}]}, "logits"),
        ({"model_name": "other", "inputs": [tensor(contents={"bytes_contents": [b"x"]})]},
         "not served"),
        ({"model_version": "2"}, "only version"),
        ({"inputs": [tensor("\x00é" * 300)]}, "x00"),
    ],
)  # fmt: skip
async def test_refused_tensors_over_grpc(fields: dict[str, Any], word: str) -> None:
    """By status; nothing reaches the queue."""
    bench = make_bench()
    async with serving(bench) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(pb.ModelInferRequest(**{"model_name": "tiny"} | fields))
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    assert word in str(caught.value.details())
    assert bench.queue.admitted == []


@pytest.mark.parametrize(
    ("datatype", "field", "values", "raw"),
    [
        ("BOOL", "bool_contents", [True], b"\1"),
        ("INT8", "int_contents", [-3], b"\xfd"),
        ("INT16", "int_contents", [-300], struct.pack("<h", -300)),
        ("INT32", "int_contents", [2**31 - 1], struct.pack("<i", 2**31 - 1)),
        ("INT64", "int64_contents", [-(2**63)], struct.pack("<q", -(2**63))),
        ("UINT8", "uint_contents", [255], b"\xff"),
        ("UINT16", "uint_contents", [65535], b"\xff\xff"),
        ("UINT32", "uint_contents", [2**32 - 1], b"\xff" * 4),
        ("UINT64", "uint64_contents", [2**64 - 1], b"\xff" * 8),
        ("FP32", "fp32_contents", [0.5], struct.pack("<f", 0.5)),
        ("FP64", "fp64_contents", [0.1], struct.pack("<d", 0.1)),
        ("BYTES", "bytes_contents", [b"\xc3\xa9"], packed(b"\xc3\xa9")),
    ],
)
def test_both_forms_of_every_type_are_read_alike(
    datatype: str, field: str, values: list[Any], raw: bytes
) -> None:
    """The field of the type, and the raw bytes."""
    name = "stop" if datatype == "BYTES" else "cache_salt"
    typed = infer_request()
    typed.ClearField("raw_input_contents")
    typed.inputs[0].contents.bytes_contents.append(b"hi")
    extra = typed.inputs.add(name=name, datatype=datatype, shape=[1])
    getattr(extra.contents, field).extend(values)
    packed_request = infer_request()
    packed_request.inputs.add(name=name, datatype=datatype, shape=[1])
    packed_request.raw_input_contents.append(raw)
    assert outcome_of_grpc(typed) == outcome_of_grpc(packed_request)
    if datatype == "BYTES":
        assert oip_codec.decode_infer(typed, "").raw.stop == ["é"]


def outcome_of_grpc(request: pb.ModelInferRequest) -> Any:
    """What is asked of the validator, or the refusal."""
    try:
        return oip_codec.decode_infer(request, "").raw
    except RequestRejected as error:
        return error.message


def outcome_of_rest(body: dict[str, Any]) -> Any:
    """The same over JSON."""
    try:
        parsed = parse(json.dumps(body).encode(), InferBody)
        return parsed.to_raw(model="tiny", tenant="", client_id="mine")
    except RequestRejected as error:
        return error.message.removeprefix("parameters.")


VALUES = st.one_of(
    st.integers(-5, 5), st.booleans(), st.text(max_size=3), st.floats(-2, 2, width=32)
)
NAMES = st.sampled_from(
    ["max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "n", "unknown"]
)


@settings(max_examples=300)
@given(text=st.text(max_size=8), parameters=st.dictionaries(NAMES, VALUES, max_size=4))
def test_both_sides_ask_the_validator_the_same(text: str, parameters: dict[str, Any]) -> None:
    """REST and gRPC, text and parameters of any type."""
    body = {
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [text]}],
        "parameters": parameters,
    }
    assert outcome_of_rest(body) == outcome_of_grpc(infer_request(text, **parameters))
