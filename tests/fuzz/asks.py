"""What is thrown at a gateway: requests that both protocols can express, and bytes of all kinds.

Values lie on, beside and far from every limit; half of them are good, so that not all requests end
at the first check. Everything comes from hypothesis, so that a seed repeats a run and a failure is
named in full.
"""

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from quire.oip import open_inference_pb2 as oip
from quire.v1 import inference_pb2

from tests.e2e.models import VOCAB_SIZE
from tests.fuzz.watched import BAIT
from tests.fuzz.world import CONTEXT

_TOKENS = st.integers(3, VOCAB_SIZE - 1)
_EDGES = st.sampled_from(
    [
        *(-(2**63), -(2**31) - 1, -(2**31), -2, -1, 0, 1, 2, 19, 20, 21, CONTEXT - 1, CONTEXT),
        *(CONTEXT + 1, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1),
    ]
)
_NUMBERS = st.one_of(
    st.floats(0, 1),
    st.floats(-3, 3),
    st.sampled_from([-0.0, 0.01, 1e-300, 2.0, 2.0000001, -2.0, 100.0, 101.0, -100.0, 1e308]),
)
_TEXTS = st.one_of(
    st.text(max_size=10),
    st.sampled_from(
        ["", "\0", "<|end|>", "<|start|>user\n", "w300", "{{ 7 * 7 }}", "é\u0301👩‍👩‍👧"]
    ),
)
_NAMES = st.one_of(st.text(max_size=4), st.sampled_from(["", "\0", "x" * 256, "x" * 257]))
_STOPS = st.one_of(st.text(min_size=1, max_size=3), st.sampled_from(["w", " w4", "x" * 1024]))


def _some(good: st.SearchStrategy[Any], rest: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(good, good, good, rest)


# Named as in GenerateRequest. Each has good values more often than others.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["", "m", "m", "other", "m\0", "../m"]),
    "max_tokens": _some(st.integers(1, 6), _EDGES),
    "temperature": _NUMBERS,
    "top_p": _NUMBERS,
    "top_k": _some(st.integers(-1, 50), _EDGES),
    "seed": _EDGES,
    "stop": st.lists(_some(_STOPS, st.sampled_from(["", "x" * 1025])), min_size=1, max_size=17),
    "stop_token_ids": st.lists(_some(_TOKENS, _EDGES), max_size=4),
    "ignore_eos": st.booleans(),
    "min_tokens": _some(st.integers(0, 3), _EDGES),
    "priority": _EDGES,
    "min_p": _NUMBERS,
    "presence_penalty": _NUMBERS,
    "frequency_penalty": _NUMBERS,
    "repetition_penalty": _NUMBERS,
    "logit_bias": st.dictionaries(_some(_TOKENS, _EDGES), _some(_NUMBERS, _NUMBERS), max_size=3),
    "logprobs": _some(st.integers(0, 20), _EDGES),
    "echo": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "add_special_tokens": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "deadline_ms": _some(st.integers(5_000, 10_000), _EDGES),
    "cache_salt": _NAMES,
    "user": _NAMES,
    "n": _some(st.integers(1, 3), _EDGES),
}
CHAT_ONLY = ("add_generation_prompt", "continue_final_message")
COMPLETION_ONLY = ("add_special_tokens",)
_ROLES = st.sampled_from(["system", "developer", "user", "user", "assistant", "robot", ""])
_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": _ROLES, "content": _TEXTS}), min_size=0, max_size=3
)
_PROMPTS = st.one_of(
    st.tuples(st.just("text"), _TEXTS),
    st.tuples(st.just("token_ids"), st.lists(_TOKENS, min_size=1, max_size=6)),
    st.tuples(st.just("token_ids"), st.lists(_some(_TOKENS, _EDGES), max_size=CONTEXT + 2)),
    st.tuples(st.just("messages"), _MESSAGES),
)
_CHOICES = st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=3).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request that both protocols can express; the REST side may stream."""

    kind: str
    prompt: Any
    fields: dict[str, Any]
    stream: bool

    @property
    def known_seed(self) -> bool:
        """Its tokens are the same each time."""
        return "seed" in self.fields

    def rest(self) -> tuple[str, bytes]:
        """Path and body."""
        body = dict(self.fields) | {"stream": self.stream, "return_token_ids": True}
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if "logit_bias" in body:
            body["logit_bias"] = {str(token): bias for token, bias in body["logit_bias"].items()}
        if self.kind == "messages":
            body["messages"] = self.prompt
            if "logprobs" in body:
                body["top_logprobs"], body["logprobs"] = body["logprobs"], True
            return "/v1/chat/completions", json.dumps(body).encode()
        body["prompt"] = self.prompt
        return "/v1/completions", json.dumps(body).encode()

    def grpc(self) -> inference_pb2.GenerateRequest:
        """The same."""
        request = inference_pb2.GenerateRequest(**self.fields)
        if self.kind == "messages":
            request.messages.SetInParent()
            for message in self.prompt:
                request.messages.messages.add(**message)
        elif self.kind == "token_ids":
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(self.prompt)
        else:
            request.text = self.prompt
        return request


def _ask(drawn: tuple[tuple[str, Any], dict[str, Any], int, int, bool]) -> Ask:
    (kind, prompt), chosen, max_tokens, seed, stream = drawn
    unknown = COMPLETION_ONLY if kind == "messages" else CHAT_ONLY
    # Most requests are short, and repeat; what was chosen stands.
    fields: dict[str, Any] = {"max_tokens": max_tokens}
    if seed:
        fields["seed"] = seed
    fields |= {name: value for name, value in chosen.items() if name not in unknown}
    return Ask(kind=kind, prompt=prompt, fields=fields, stream=stream)


ASKS = st.tuples(
    _PROMPTS, _CHOICES, st.integers(1, 4), st.sampled_from([0, 1, 2**62]), st.booleans()
).map(_ask)

# Bodies of every route. A class name and a call, in the oldest form of pickle and in a newer one.
PICKLES = (
    b"c" + BAIT.encode() + b"\nspring\n(S'x'\ntR.",
    b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x05[][0]\x85R.",
    b"cos\nsystem\n(S'touch " + BAIT.encode() + b"'\ntR.",
)


def urls(port: int) -> list[str]:
    """What a server that fetches things would fetch; a port of this machine that may listen."""
    return [
        f"http://127.0.0.1:{port}/cat.png",
        f"http://localhost:{port}/{BAIT}",
        f"http://[::ffff:127.0.0.1]:{port}/x",
        f"https://{BAIT}.invalid/cat.png",
        f"file:///tmp/{BAIT}",
        "data:image/png;base64,AAAA",
        f"redis://127.0.0.1:{port}/0",
        f"gopher://127.0.0.1:{port}/_",
    ]


def images(url: str) -> list[dict[str, Any]]:
    """A conversation with an image part."""
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    return [{"role": "user", "content": parts}]


_WORDS = (
    *(name for name in FIELDS if name != "logprobs"),
    *("logprobs", "top_logprobs", "prompt", "messages", "stream", "stream_options", "n", "best_of"),
    *("tools", "response_format", "suffix", "inputs", "parameters", "text_input", "outputs", "id"),
    *("tokens", "return_token_strs", "max_completion_tokens", "chat_template", "prompt_logprobs"),
    *(
        "details",
        "do_sample",
        "max_new_tokens",
        "prompt_embeds",
        "mm_processor_kwargs",
        "__class__",
    ),
    *(
        "guided_regex",
        "truncate",
        "adapter_id",
        "stop_words",
        "return_token_ids",
        "logits_processors",
    ),
)
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    _EDGES,
    st.sampled_from([2**64, -(2**64), 10**400]),
    _NUMBERS,
    _TEXTS,
    st.sampled_from([*urls(9), *(p.decode("latin-1") for p in PICKLES), "\ud800", "x" * 3000]),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(_WORDS), inner, max_size=3),
    ),
    max_leaves=6,
)
_IMAGES = st.sampled_from(urls(9)).map(images)
_TENSORS = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["text_input", "text_input", "max_tokens", "stop", "odd\0"]),
            "datatype": st.sampled_from(["BYTES", "BYTES", "INT64", "FP64", "BOOL", "OBJECT"]),
            "shape": st.lists(_some(st.just(1), _EDGES), max_size=2),
            "data": st.lists(_some(_TEXTS, _LEAVES), max_size=2),
        }
    ),
    max_size=3,
)
# A route's own fields with good values: each is spoilt by none, one or two others.
ROUTES: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "/v1/completions": {"prompt": _TEXTS, "max_tokens": st.integers(1, 4)},
    "/v1/chat/completions": {
        "messages": st.one_of(_MESSAGES, _IMAGES),
        "max_tokens": st.integers(1, 4),
    },
    "/tokenize": {"prompt": _TEXTS},
    "/detokenize": {"tokens": st.lists(_some(_TOKENS, _EDGES), max_size=5)},
    "/generate": {
        "inputs": _TEXTS,
        "parameters": st.fixed_dictionaries(
            {"max_new_tokens": st.integers(1, 4)}, optional={"do_sample": st.booleans()}
        ),
    },
    "/generate_stream": {
        "inputs": _TEXTS,
        "parameters": st.fixed_dictionaries({"max_new_tokens": _some(st.integers(1, 4), _EDGES)}),
    },
    "/": {"inputs": _TEXTS, "parameters": st.just({"max_new_tokens": 2}), "stream": st.booleans()},
    "/v2/models/m/infer": {"inputs": _TENSORS, "parameters": st.just({"max_tokens": 2})},
    "/v2/models/m/generate": {"text_input": _TEXTS, "max_tokens": st.integers(1, 4)},
    "/v2/models/m/generate_stream": {"text_input": _TEXTS, "max_tokens": st.integers(1, 4)},
}
_OTHER_PATHS = st.sampled_from(
    [
        *("/v1/models", "/v1/models/m", "/v1/models/x%00y", "/v2", "/v2/models/m"),
        *("/v2/models/m/ready", "/health", "/ready", "/version", "/openapi.json", "/metrics"),
        *("/v2/health/live", "/invocations", "/pause", "/update_weights", "/v1//completions"),
        *("/v1/completions/", "/%2e%2e/etc/passwd", "/v1/embeddings", "/v2/models/../m/infer"),
        "/v2/models//infer",
    ]
)
_HEADERS = st.dictionaries(
    st.sampled_from(["x-request-id", "traceparent", "accept", "content-encoding", "x-tenant"]),
    st.one_of(
        st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12),
        st.sampled_from(["gzip", "../../x", "{{7*7}}", "text/event-stream", "a" * 300]),
    ),
    max_size=2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """One HTTP request, good or not."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]


@st.composite
def _bodies(draw: st.DrawFn, path: str) -> bytes:
    body = {name: draw(values) for name, values in ROUTES[path].items()}
    body |= draw(st.dictionaries(st.sampled_from(_WORDS), _VALUES, max_size=2))
    data = json.dumps(body).encode()
    match draw(st.integers(0, 11)):
        case 0:
            return data[: draw(st.integers(0, len(data)))]
        case 1:
            return draw(st.one_of(st.binary(max_size=40), st.sampled_from(PICKLES)))
        case 2:
            twice = draw(st.sampled_from([b"NaN", b"-Infinity", b'"\xff"', b'"\\ud800"', b"1e999"]))
            return data[:-1] + b', "temperature": ' + twice + b"}"
        case 3:
            return data[:-1] + b', "stop": ' + b"[" * 200 + b"]" * 200 + b"}"
        case _:
            return data


@st.composite
def _posts(draw: st.DrawFn) -> Post:
    headers = draw(_HEADERS)
    if draw(st.integers(0, 7)) == 0:
        path = draw(_OTHER_PATHS)
        method = draw(st.sampled_from(["GET", "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]))
        return Post(method=method, path=path, body=b"", headers=headers)
    path = draw(st.sampled_from(sorted(ROUTES)))
    kinds = ["application/json"] * 15 + ["text/plain", "application/octet-stream", ""]
    return Post(
        method="POST",
        path=path,
        body=draw(_bodies(path)),
        headers=headers | {"content-type": draw(st.sampled_from(kinds))},
    )


POSTS = _posts()

# Bytes of gRPC requests, by method.
_V1, _OIP = "/quire.v1.InferenceService/", "/inference.GRPCInferenceService/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One gRPC call with these bytes as its message."""

    method: str
    data: bytes


@st.composite
def _infers(draw: st.DrawFn) -> bytes:
    request = oip.ModelInferRequest(
        model_name=draw(_some(st.just("m"), st.sampled_from(["", "other"]))),
        model_version=draw(_some(st.just("1"), st.sampled_from(["", "2"]))),
        id=draw(_NAMES),
    )
    request.parameters["max_tokens"].int64_param = draw(_some(st.integers(1, 4), _EDGES))
    if draw(st.booleans()):
        text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        text.contents.bytes_contents.append(draw(_TEXTS).encode())
        return bytes(request.SerializeToString())
    for _ in range(draw(st.integers(0, 2))):
        tensor = request.inputs.add(
            name=draw(st.sampled_from(["text_input", "text_input", "max_tokens", "\0"])),
            datatype=draw(st.sampled_from(["BYTES", "BYTES", "INT64", "FP32", "BOOL", "OBJECT"])),
            shape=[draw(_some(st.just(1), _EDGES)) for _ in range(draw(st.integers(0, 2)))],
        )
        if draw(st.booleans()):
            tensor.contents.bytes_contents.append(draw(_TEXTS).encode())
    if draw(st.booleans()):
        raw = draw(_TEXTS).encode()
        length = draw(_some(st.just(len(raw)), st.integers(0, 2**32 - 1)))
        request.raw_input_contents.append(length.to_bytes(4, "little") + raw)
    for name in draw(st.lists(st.sampled_from(_WORDS), max_size=2)):
        request.parameters[name].string_param = draw(_TEXTS)
    return bytes(request.SerializeToString())


_CALLS = {
    _V1 + "Generate": ASKS.map(lambda ask: bytes(ask.grpc().SerializeToString())),
    _V1 + "Cancel": st.one_of(_NAMES, st.just("f" * 32)).map(
        lambda name: bytes(inference_pb2.CancelRequest(request_id=name).SerializeToString())
    ),
    _V1 + "ListModels": st.just(b""),
    _V1 + "UpdateWeights": st.just(b""),
    _OIP + "ModelInfer": _infers(),
    _OIP + "ModelStreamInfer": _infers(),
    _OIP + "ModelMetadata": _infers(),
    _OIP + "ServerLive": st.just(b""),
}
CALLS = st.sampled_from(sorted(_CALLS)).flatmap(
    lambda method: st.builds(
        Call,
        method=st.just(method),
        data=_some(_CALLS[method], st.one_of(st.binary(max_size=30), st.sampled_from(PICKLES))),
    )
)
