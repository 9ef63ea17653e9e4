"""The OpenAPI document against the route table, the validator and the answers themselves."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.core.types import ModelInfo
from gateway.rest import openapi, openapi_answers
from gateway.rest.auth import Guarded
from tests.unit.gateway.answering import answering
from tests.unit.gateway.fakes import MODEL, Bench, make_bench
from tests.unit.gateway.test_auth import OPEN, client_of, rest_of

DOCUMENT = openapi.document(MODEL, MODEL.max_model_len)
SCHEMAS = DOCUMENT["components"]["schemas"]
# A body that is good, for each class of bodies, and a route that takes it.
GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "CompletionBody": ("/v1/completions", {"prompt": "x"}),
    "ChatBody": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "TokenizeBody": ("/tokenize", {"prompt": "x"}),
    "DetokenizeBody": ("/detokenize", {"tokens": [1]}),
    "TgiBody": ("/generate", {"inputs": "x"}),
    "TgiParameters": ("/generate", {"inputs": "x", "parameters": {}}),
    "GenerateBody": ("/v2/models/tiny/generate", {"text_input": "x"}),
    "Parameters": ("/v2/models/tiny/generate", {"text_input": "x", "parameters": {}}),
}
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}
GOOD["InferBody"] = ("/v2/models/tiny/infer", {"inputs": [TENSOR]})
INNER = {"TgiParameters": "parameters", "Parameters": "parameters"}


def test_paths_and_methods_are_those_of_the_route_table() -> None:
    """No route without a word, no word without a route; and the same ones need a key."""
    routes = {
        (route.path.replace(":path", ""), method.lower(), isinstance(route, Guarded))
        for route in rest_of(make_bench()).routes()
        for method in route.methods or ()
        if method != "HEAD"
    }
    said = {
        (path, method, bool(operation["security"]))
        for path, operations in DOCUMENT["paths"].items()
        for method, operation in operations.items()
    }
    assert said == routes
    assert {path for path, _, guarded in said if not guarded} == OPEN


def test_every_reference_resolves() -> None:
    """Within the document."""
    text = json.dumps(DOCUMENT)
    for name in set(part.split('"')[0] for part in text.split("#/components/schemas/")[1:]):
        assert name in SCHEMAS


def test_answers_have_no_bounds_of_requests() -> None:
    """A seed that is drawn may be larger than one that can be asked for."""
    for name, schema in SCHEMAS.items():
        answer = getattr(openapi_answers, name, None)
        if answer is not None:
            own = answer.model_json_schema(ref_template="#/components/schemas/{model}")
            assert schema["properties"] == own["properties"]


def branches(shape: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The kinds of value that a field takes, but null."""
    for branch in shape.get("anyOf", [shape]):
        if branch.get("type") != "null":
            yield branch


def edges(branch: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Values at each bound, and one step beyond it, with what the document says of them."""
    number = 1e-6 if branch.get("type") == "number" else 1
    if "minimum" in branch:
        yield branch["minimum"], True
        yield branch["minimum"] - number, False
    if "maximum" in branch:
        yield branch["maximum"], True
        yield branch["maximum"] + number, False
    if "exclusiveMinimum" in branch:
        yield branch["exclusiveMinimum"], False
        yield branch["exclusiveMinimum"] + number, True
    if branch.get("type") == "string" and "maxLength" in branch:
        yield "x" * branch["maxLength"], True
        yield "x" * (branch["maxLength"] + 1), False
    if branch.get("minLength"):
        yield "x" * branch["minLength"], True
        yield "x" * (branch["minLength"] - 1), False
    if "enum" in branch:
        for value in branch["enum"]:
            yield value, True
        yield "something else", False
    if branch.get("type") == "array":
        yield from list_edges(branch)
    if "maxProperties" in branch:
        inner = branch["additionalProperties"]
        most = branch["maxProperties"]
        yield {str(i): 0 for i in range(most)}, True
        yield {str(i): 0 for i in range(most + 1)}, False
        for value, good in edges(inner):
            yield {"1": value}, good
        for key in ("01", "-1", "x", "1.0", ""):
            yield {key: 0}, False


def list_edges(branch: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Of a list's length and of its elements."""
    if branch.get("minItems"):
        yield [], False
    item = next(iter(branches(branch.get("items", {}))))
    filler = {"string": "x", "integer": 1, "array": [1]}.get(item.get("type", ""))
    if filler is None:
        return
    if branch.get("maxItems", 2**30) < 2**15:
        yield [filler] * branch["maxItems"], True
        yield [filler] * (branch["maxItems"] + 1), False
    for value, good in edges(item):
        yield [value], good


def bounded() -> Iterator[tuple[str, str, Any, bool]]:
    """Body, field, value, whether it is good: for every bound of every body."""
    for body in GOOD:
        for name, shape in SCHEMAS[body]["properties"].items():
            for branch in branches(shape):
                for value, good in edges(branch):
                    yield body, name, value, good


# Where a value that is good by itself is not good with the rest of the body.
COMPANY: dict[tuple[str, str], dict[str, Any]] = {
    ("CompletionBody", "min_tokens"): {"max_tokens": 512},
    ("Parameters", "min_tokens"): {"max_tokens": 512},
    ("CompletionBody", "max_tokens"): {"echo": True},
    ("ChatBody", "top_logprobs"): {"logprobs": True},
    ("TgiParameters", "temperature"): {"do_sample": True},
}


async def verdict(bench: Bench, body: str, name: str, value: Any) -> httpx.Response:
    """Of the gateway on a good body with this field."""
    path, good = GOOD[body]
    fields = {name: value} | COMPANY.get((body, name), {})
    inner = INNER.get(body)
    whole = good | ({inner: fields} if inner else fields)
    async with answering(bench), client_of(bench, None) as client:
        return await client.post(f"http://127.0.0.1{path}", json=whole)


async def test_every_bound_is_the_validator_s() -> None:
    """At the limit it is taken, one beyond it is refused by name."""
    bench, wrong, num = make_bench(), [], 0
    for body, name, value, good in bounded():
        if (name, value) in (("min_tokens", 2**31 - 1), ("min_tokens", 2**31)):
            # Bounded by max_tokens before.
            continue
        num += 1
        response = await verdict(bench, body, name, value)
        if (response.status_code == 200) is not good:
            wrong.append((body, name, str(value)[:50], good, response.text[:200]))
        elif not good:
            assert response.status_code in (400, 404)
            assert name in response.text or response.json()["error"], response.text
    assert wrong == []
    assert num > 300


@pytest.mark.parametrize("body", [name for name in GOOD if name not in INNER])
async def test_answers_have_the_shape_that_is_said(body: str) -> None:
    """Field by field, none more; with all that adds to them."""
    path, good = GOOD[body]
    extras: dict[str, dict[str, Any]] = {
        "CompletionBody": {"logprobs": 2, "echo": True, "return_token_ids": True},
        "ChatBody": {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        "TokenizeBody": {"return_token_strs": True},
        "TgiBody": {"parameters": {"details": True, "return_full_text": True}},
        "GenerateBody": {"id": "mine"},
    }
    more = extras.get(body, {})
    answers = {op.path: op.answer for op in openapi.OPERATIONS}
    bench = make_bench()
    for fields in (good, good | more):
        async with answering(bench), client_of(bench, None) as client:
            response = await client.post(f"http://127.0.0.1{path}", json=fields)
        assert response.status_code == 200, response.text
        answer = answers[path.replace("tiny", "{name}")]
        assert isinstance(answer, type)
        answer.model_validate_json(response.content, strict=True)


async def test_answers_without_a_body_have_their_shape() -> None:
    """Each path that only needs to be asked."""
    bench = make_bench()
    async with client_of(bench, None) as client:
        for op in openapi.OPERATIONS:
            if op.method == "get" and isinstance(op.answer, type):
                path = op.path.replace("{name}", MODEL.name)
                response = await client.get(f"http://127.0.0.1{path}")
                assert response.status_code == 200
                op.answer.model_validate_json(response.content, strict=True)


async def test_the_document_is_served() -> None:
    """As it is."""
    async with client_of(make_bench(), None) as client:
        response = await client.get("http://127.0.0.1/openapi.json")
    assert response.json() == json.loads(json.dumps(DOCUMENT))


async def test_the_document_is_made_once_for_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than a request, so that asking for it must not hold up others."""
    made: list[int] = []

    def document(model: ModelInfo, max_model_len: int) -> dict[str, Any]:
        made.append(max_model_len)
        return {"context": max_model_len}

    monkeypatch.setattr(openapi, "document", document)
    bench = make_bench()
    contexts = [MODEL.max_model_len, 100, MODEL.max_model_len]
    async with client_of(bench, None) as client:
        for context in contexts:
            bench.fleet.max_model_len = context
            for _ in range(3):
                response = await client.get("http://127.0.0.1/openapi.json")
                assert response.json() == {"context": context}
    assert made == contexts
