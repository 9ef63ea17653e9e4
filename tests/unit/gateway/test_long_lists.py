"""Messages of a few bytes an entry hold millions: refused before anything is made of them."""

from typing import Any

import grpc
import grpc.aio
import pytest
from quire.oip import open_inference_pb2 as oip
from quire.v1 import inference_pb2

from gateway import codec, oip_codec
from gateway.core import prompt
from gateway.core.errors import RequestRejected
from gateway.core.validation import check
from servicekit.grpc_server import channel
from tests.unit.gateway.fakes import MODEL, make_bench
from tests.unit.gateway.test_grpc_limits import serving, stub_of

LONG: dict[str, tuple[dict[str, Any], str]] = {
    "messages": (
        {"messages": {"messages": [{}] * 4097}},
        "messages: at most 4096 messages, not 4097.",
    ),
    "token ids": (
        {"token_ids": {"ids": [1] * (2**20 + 1)}},
        "prompt: at most 1048576 token ids, not 1048577.",
    ),
    "stops": ({"stop": [""] * 17}, "stop: at most 16 strings, not 17."),
    "stop tokens": ({"stop_token_ids": [1] * 129}, "stop_token_ids: at most 128 ids, not 129."),
    "biases": (
        {"logit_bias": dict.fromkeys(range(1025), 0.0)},
        "logit_bias: at most 1024 tokens, not 1025.",
    ),
}


@pytest.mark.parametrize("what", LONG)
def test_entries_are_counted_before_they_are_read(what: str) -> None:
    """In the validator's words, which come first there too, whatever else is wrong."""
    fields, message = LONG[what]
    request = inference_pb2.GenerateRequest(**fields)
    with pytest.raises(RequestRejected) as caught:
        codec.check_generate(request)
    assert caught.value.message == message
    with pytest.raises(RequestRejected) as caught:
        check(codec.decode_generate(request), MODEL)
    assert caught.value.message == message


async def test_a_call_with_too_many_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message is made, and the call is told."""
    made: list[str] = []

    def message(role: str, content: str) -> prompt.Message:
        made.append(role)
        return prompt.Message(role=role, content=content)

    monkeypatch.setattr(codec, "Message", message)
    request = inference_pb2.GenerateRequest()
    request.messages.MergeFromString(b"\x0a\x00" * 5000)
    async with serving(make_bench()) as address, channel(address) as found:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(found).Generate(request).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "messages: at most 4096 messages, not 5000."
    assert made == []


def test_tensors_contents_are_counted_before_they_are_read() -> None:
    """Of the other protocol."""
    request = oip.ModelInferRequest(raw_input_contents=[b""] * 100_000)
    with pytest.raises(RequestRejected, match="raw_input_contents: 100000 contents for 0 inputs"):
        oip_codec.decode_infer(request, "")
