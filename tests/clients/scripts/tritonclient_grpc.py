"""tritonclient over gRPC: the Open Inference Protocol, whole answers and a stream."""

import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from checks import API_KEY, GRPC, HAS_KEYS, MODEL, PROMPTS, cancelled, check, equal, main, raises
from tritonclient.utils import InferenceServerException

HEADERS = {"authorization": f"Bearer {API_KEY}"} if HAS_KEYS else None
client = triton.InferenceServerClient(GRPC)
GREEDY = {"temperature": 0.0, "max_tokens": 8}
WAIT_S = 60


def tensor(name: str, datatype: str, values: list[Any]) -> triton.InferInput:
    """An input of one dimension."""
    kind: type = {"BYTES": object, "INT64": np.int64, "FP64": np.float64, "FP32": np.float32}[
        datatype
    ]
    given = triton.InferInput(name, [len(values)], datatype)
    given.set_data_from_numpy(np.array(values, dtype=kind))
    return given


def prompt(text: str) -> list[triton.InferInput]:
    """The input that every call needs."""
    return [tensor("text_input", "BYTES", [text.encode()])]


def infer(text: str, model: str = MODEL, **parameters: object) -> triton.InferResult:
    """A whole answer."""
    return client.infer(model, prompt(text), headers=HEADERS, parameters={**GREEDY, **parameters})


def text_of(result: triton.InferResult) -> str:
    """The answer's text."""
    return bytes(result.as_numpy("text_output")[0]).decode()


@check
def server() -> None:
    """Server and model are live and ready, and describe themselves."""
    assert client.is_server_live(headers=HEADERS)
    assert client.is_server_ready(headers=HEADERS)
    assert client.is_model_ready(MODEL, headers=HEADERS)
    equal(client.get_server_metadata(headers=HEADERS).name, "quire")
    described = client.get_model_metadata(MODEL, headers=HEADERS)
    assert "text_input" in [given.name for given in described.inputs]
    equal([given.name for given in described.outputs], ["text_output"])


@check
def whole() -> None:
    """An answer comes in raw_output_contents, with its reason and usage."""
    result = infer(PROMPTS[0])
    assert "Paris" in text_of(result)
    response = result.get_response()
    equal(len(response.raw_output_contents), 1)
    equal(response.parameters["completion_tokens"].int64_param, 8)
    equal(response.parameters["finish_reason"].string_param, "length")


@check
def tensors() -> None:
    """Sampling parameters may come as tensors."""
    more = [
        tensor("max_tokens", "INT64", [4]),
        tensor("temperature", "FP64", [0.0]),
        tensor("seed", "INT64", [7]),
    ]
    outputs = [triton.InferRequestedOutput("text_output")]
    result = client.infer(MODEL, [*prompt(PROMPTS[0]), *more], outputs=outputs, headers=HEADERS)
    equal(result.get_response().parameters["completion_tokens"].int64_param, 4)
    assert (
        infer(PROMPTS[0]).as_numpy("text_output")[0].startswith(result.as_numpy("text_output")[0])
    )


@check
def parameters() -> None:
    """Stop and seed are taken."""
    text = text_of(infer(PROMPTS[0]))
    equal(text_of(infer(PROMPTS[0], stop=text[2:4])), text[: text.index(text[2:4])])
    equal(*(text_of(infer(PROMPTS[0], temperature=1.5, seed=7)) for _ in range(2)))


@check
def asynchronous() -> None:
    """Calls run side by side."""
    results: queue.Queue[Any] = queue.Queue()
    for _ in range(4):
        client.async_infer(
            MODEL,
            prompt(PROMPTS[0]),
            callback=lambda result, error: results.put(error or result),
            headers=HEADERS,
            parameters=GREEDY,
        )
    for _ in range(4):
        assert "Paris" in text_of(results.get(timeout=WAIT_S))


@check
def stream() -> None:
    """A stream carries answers side by side, in pieces, and refuses a wrong one alone."""
    results: queue.Queue[Any] = queue.Queue()
    mine = triton.InferenceServerClient(GRPC)
    mine.start_stream(lambda result, error: results.put(error or result), headers=HEADERS)
    wanted = {"a": PROMPTS[0], "b": PROMPTS[1]}
    for name, text in wanted.items():
        mine.async_stream_infer(
            MODEL,
            prompt(text),
            request_id=name,
            parameters=GREEDY,
            enable_empty_final_response=True,
        )
    mine.async_stream_infer(MODEL, prompt("x"), request_id="c", parameters={"temperature": -1.0})
    texts, running, refused = dict.fromkeys(wanted, ""), set(wanted), False
    while running or not refused:
        got = results.get(timeout=WAIT_S)
        if isinstance(got, InferenceServerException):
            assert "temperature" in got.message(), got
            refused = True
            continue
        response = got.get_response()
        texts[response.id] += text_of(got)
        if response.parameters["triton_final_response"].bool_param:
            running.discard(response.id)
    mine.stop_stream()
    equal(texts, {name: text_of(infer(text)) for name, text in wanted.items()})


@check
def errors() -> None:
    """Errors are the SDK's own type and carry the status."""
    wrong = raises(InferenceServerException, lambda: infer("x", temperature=-1.0))
    equal(wrong.status(), "StatusCode.INVALID_ARGUMENT")
    assert "temperature" in wrong.message()
    missing = raises(InferenceServerException, lambda: infer("x", model="another"))
    equal(missing.status(), "StatusCode.NOT_FOUND")
    if HAS_KEYS:
        strangers = {"authorization": "Bearer wrong"}
        refused = raises(
            InferenceServerException,
            lambda: client.infer(MODEL, prompt("x"), headers=strangers),
        )
        equal(refused.status(), "StatusCode.UNAUTHENTICATED")


@check
def leaving() -> None:
    """A stream that is left early is cancelled."""
    results: queue.Queue[Any] = queue.Queue()
    mine = triton.InferenceServerClient(GRPC)
    longer = {**GREEDY, "max_tokens": 2000, "ignore_eos": True}
    with cancelled():
        mine.start_stream(lambda result, error: results.put(error or result), headers=HEADERS)
        mine.async_stream_infer(MODEL, prompt(PROMPTS[0]), parameters=longer)
        assert text_of(results.get(timeout=WAIT_S))
        mine.stop_stream(cancel_requests=True)


if __name__ == "__main__":
    sys.exit(main())
