"""REST and gRPC ask one validator: what one takes or refuses, so does the other."""

import json
from dataclasses import replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire.v1 import common_pb2, inference_pb2, queue_pb2

from gateway import codec
from gateway.core.errors import RequestRejected
from gateway.core.requests import CheckedRequest, RawRequest
from gateway.core.types import FinishReason, ModelInfo, QueuedRequest, RequestId, Sampling
from gateway.core.validation import check
from gateway.rest.bodies import parse
from gateway.rest.schemas import ChatBody, CompletionBody

MODEL = ModelInfo(name="m", digest="d", vocab_size=50, max_model_len=64, eos_token_ids=(2,))
INT64 = st.one_of(
    st.integers(-3, 60),
    st.sampled_from([2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, -(2**63), 10**9]),
)
NUMBER = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0, 2.0000001, -2.0, -0.0, 0.01, 100.0, 101.0, 1e-300, 1e308]),
    st.floats(-3, 3),
)
NAME = st.one_of(st.text(max_size=5), st.sampled_from(["", "\0", "x" * 256, "x" * 257]))
BIASES = st.one_of(
    st.dictionaries(INT64, st.one_of(NUMBER, st.just(-100.0)), max_size=3),
    st.just(dict.fromkeys(range(1025), 0.0)),
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
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["", "m", "other"]),
    "max_tokens": INT64,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INT64,
    "seed": INT64,
    "stop": st.lists(st.one_of(st.text(max_size=3), st.just("x" * 1025)), min_size=1, max_size=18),
    "stop_token_ids": st.lists(INT64, max_size=3),
    "ignore_eos": st.booleans(),
    "min_tokens": INT64,
    "priority": INT64,
    "min_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "logit_bias": BIASES,
    "logprobs": st.one_of(INT64, st.sampled_from([0, 20, 21])),
    "echo": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "add_special_tokens": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "deadline_ms": INT64,
    "cache_salt": NAME,
    "user": NAME,
    "n": st.one_of(INT64, st.sampled_from([1, 2, 128, 129])),
}
# Few at a time: what is refused first hides the rest.
SOME_FIELDS = st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=3).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
# What gRPC has in one message, REST has in one of its two bodies.
CHAT_ONLY = ("add_generation_prompt", "continue_final_message")
COMPLETION_ONLY = ("add_special_tokens",)


def verdict(raw: RawRequest) -> CheckedRequest | tuple[str, str | None, str]:
    """What the validator says."""
    try:
        return check(raw, MODEL)
    except RequestRejected as error:
        return error.code, error.param, error.message


def by_rest(prompt: dict[str, Any], fields: dict[str, Any]) -> RawRequest:
    """Through JSON. A chat asks for logprobs with two fields."""
    body = dict(fields)
    schema: type[CompletionBody | ChatBody] = CompletionBody
    if "messages" in prompt:
        schema, body["messages"] = ChatBody, prompt["messages"]
        if "logprobs" in body:
            body["top_logprobs"], body["logprobs"] = body["logprobs"], True
    else:
        body["prompt"] = next(iter(prompt.values()))
    if "logit_bias" in body:
        body["logit_bias"] = {str(token): bias for token, bias in body["logit_bias"].items()}
    parsed = parse(json.dumps(body).encode(), schema)
    [raw] = parsed.to_raws(client_id="", tenant="t", traceparent=TRACE)
    return replace(raw, num_logprobs_name="logprobs")


def by_grpc(prompt: dict[str, Any], fields: dict[str, Any]) -> RawRequest:
    """Through bytes. What REST's body for this prompt does not have is left out."""
    unknown = COMPLETION_ONLY if "messages" in prompt else CHAT_ONLY
    fields = {name: value for name, value in fields.items() if name not in unknown}
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
        inference_pb2.GenerateRequest.FromString(request.SerializeToString()),
        tenant="t",
        traceparent=TRACE,
    )


@settings(max_examples=1000, deadline=None)
@given(prompt=PROMPT, fields=SOME_FIELDS)
# Two faults in a map, which has no order over gRPC.
@example(prompt={"text": ""}, fields={"logit_bias": {1: 101.0, 2**31: -100.0}})
@example(prompt={"text": ""}, fields={"logit_bias": {2**31: -100.0, 1: 101.0}})
def test_verdicts_are_equal(prompt: dict[str, Any], fields: dict[str, Any]) -> None:
    """And so is what will be run."""
    assert verdict(by_rest(prompt, fields)) == verdict(by_grpc(prompt, fields))


def test_every_field_is_compared() -> None:
    """A field that is added to the contract is added here."""
    wire = {field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields}
    assert wire - {"text", "token_ids", "messages", "client_request_id"} == set(FIELDS)


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
                min_p=0.125,
                presence_penalty=-2.0,
                frequency_penalty=1.5,
                repetition_penalty=0.5,
                logit_bias=((3, 100.0), (4, -0.5)),
                num_logprobs=0,
                prompt_logprobs=True,
            ),
            priority=-7,
            life_ms=5,
            cache_salt=b"salt",
            traceparent=TRACE,
            tenant="alice",
            tenant_weight=2.5,
            sample_group=b"g" * 16,
            sample_index=3,
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
            min_p=0.125,
            presence_penalty=-2.0,
            frequency_penalty=1.5,
            repetition_penalty=0.5,
            logit_bias_token_ids=[3, 4],
            logit_biases=[100.0, -0.5],
            num_logprobs=0,
            prompt_logprobs=True,
        ),
        priority=-7,
        cache_salt=b"salt",
        traceparent=TRACE,
        tenant="alice",
        tenant_weight=2.5,
        sample_group=b"g" * 16,
        sample_index=3,
    )
    assert queue_pb2.QueueEntry.FromString(data) == queue_pb2.QueueEntry(request=expected)
