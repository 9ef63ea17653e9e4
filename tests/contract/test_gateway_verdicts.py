"""REST and gRPC ask one validator: what one takes or refuses, so does the other."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from quire.v1 import common_pb2, inference_pb2, queue_pb2

from gateway import codec
from gateway.core.errors import RequestRejected
from gateway.core.types import FinishReason, ModelInfo, QueuedRequest, RequestId, Sampling
from gateway.core.validation import CheckedRequest, RawRequest, check
from gateway.rest.schemas import ChatBody, CompletionBody

MODEL = ModelInfo(name="m", digest="d", vocab_size=50, max_model_len=64, eos_token_ids=(2,))
INT64 = st.one_of(
    st.integers(-3, 60),
    st.sampled_from([2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, -(2**63), 10**9]),
)
NUMBER = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0, 2.0000001, -0.0, 1e-300, 1e308]), st.floats(-1, 3)
)
PROMPT = st.one_of(
    st.fixed_dictionaries({"text": st.text(max_size=5)}),
    st.fixed_dictionaries({"token_ids": st.lists(INT64, max_size=4)}),
    st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.fixed_dictionaries(
                    {
                        "role": st.sampled_from(["system", "user", "assistant", "robot", ""]),
                        "content": st.text(max_size=4),
                    }
                ),
                max_size=3,
            )
        }
    ),
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["", "m", "other"]),
        "max_tokens": INT64,
        "temperature": NUMBER,
        "top_p": NUMBER,
        "top_k": INT64,
        "seed": INT64,
        "stop": st.lists(
            st.one_of(st.text(max_size=3), st.just("x" * 1025)), min_size=1, max_size=18
        ),
        "stop_token_ids": st.lists(INT64, max_size=3),
        "ignore_eos": st.booleans(),
        "min_tokens": INT64,
        "priority": INT64,
    },
)


def verdict(raw: RawRequest) -> CheckedRequest | tuple[str, str | None, str]:
    """What the validator says."""
    try:
        return check(raw, MODEL)
    except RequestRejected as error:
        return error.code, error.param, error.message


def by_rest(prompt: dict[str, Any], fields: dict[str, Any]) -> RawRequest:
    """Through JSON."""
    body = dict(fields)
    schema: type[CompletionBody | ChatBody] = CompletionBody
    if "messages" in prompt:
        schema, body["messages"] = ChatBody, prompt["messages"]
    else:
        body["prompt"] = next(iter(prompt.values()))
    return schema.model_validate_json(json.dumps(body)).to_raw("")


def by_grpc(prompt: dict[str, Any], fields: dict[str, Any]) -> RawRequest:
    """Through bytes."""
    request = inference_pb2.GenerateRequest(**fields)
    if "messages" in prompt:
        request.messages.SetInParent()
        for message in prompt["messages"]:
            request.messages.messages.add(**message)
    elif "token_ids" in prompt:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(prompt["token_ids"])
    else:
        request.text = prompt["text"]
    return codec.decode_generate(
        inference_pb2.GenerateRequest.FromString(request.SerializeToString())
    )


@settings(max_examples=400)
@given(prompt=PROMPT, fields=FIELDS)
def test_verdicts_are_equal(prompt: dict[str, Any], fields: dict[str, Any]) -> None:
    """And so is what will be run."""
    assert verdict(by_rest(prompt, fields)) == verdict(by_grpc(prompt, fields))


def test_finish_reasons_are_the_wires() -> None:
    """Name by name, number by number."""
    wire = {
        name.removeprefix("FINISH_REASON_"): number
        for name, number in common_pb2.FinishReason.items()
    }
    assert wire == {reason.name: int(reason) for reason in FinishReason}


def test_a_queued_request_carries_everything() -> None:
    """Each field once, under its own name."""
    data = codec.encode_request(
        QueuedRequest(
            request_id=RequestId(b"r" * 16),
            attempt=2,
            prompt_token_ids=[1, 2],
            output_token_ids=[3],
            sampling=Sampling(
                max_tokens=9,
                temperature=0.5,
                top_p=0.25,
                top_k=4,
                seed=2**64 - 1,
                stop_token_ids=(5, 6),
                min_tokens=1,
            ),
            priority=-7,
        ),
        "gateway",
        b"s" * 16,
    )
    expected = queue_pb2.QueuedRequest(
        request_id=b"r" * 16,
        attempt=2,
        gateway_id="gateway",
        reply_to=b"s" * 16,
        prompt_token_ids=[1, 2],
        output_token_ids=[3],
        sampling=common_pb2.SamplingParams(
            max_tokens=9,
            temperature=0.5,
            top_p=0.25,
            top_k=4,
            seed=2**64 - 1,
            stop_token_ids=[5, 6],
            min_tokens=1,
        ),
        priority=-7,
    )
    assert queue_pb2.QueueEntry.FromString(data) == queue_pb2.QueueEntry(request=expected)
