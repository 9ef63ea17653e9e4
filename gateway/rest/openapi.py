"""The OpenAPI document: every route, every field with its bounds, every answer.

Made of the bodies' own classes and the validator's own bounds; a test compares its paths with the
route table and its bounds with what the validator takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.core.types import ModelInfo
from gateway.rest import openapi_answers as answers
from gateway.rest import openapi_bounds
from gateway.rest.errors import Shape
from gateway.rest.oip import GenerateBody, InferBody
from gateway.rest.schemas import ChatBody, CompletionBody
from gateway.rest.tgi import TgiBody
from gateway.rest.tokenize import DetokenizeBody, TokenizeBody
from gateway.settings import VERSION

_REF = "#/components/schemas/"
_ERRORS: Mapping[Shape, type[BaseModel]] = {
    Shape.OPENAI: answers.OpenAIError,
    Shape.TGI: answers.TgiError,
    Shape.OPEN_INFERENCE: answers.OpenInferenceError,
}
_MEANINGS: Mapping[int, str] = {
    400: "The request is wrong; the message names the field and the limit.",
    401: "No valid API key was shown.",
    403: "Without API keys only this machine is served, by a local Host.",
    404: "No such model or path.",
    405: "The method is not allowed here.",
    408: "The request did not come in time.",
    413: "The body is too large.",
    415: "The body is not plain JSON.",
    429: "The queue is full; Retry-After says when to try again.",
    431: "The head of the request is too large.",
    499: "The request was cancelled.",
    500: "The gateway or a worker failed on this request.",
    503: "Nothing can serve the request now; Retry-After says when to try again.",
    504: "The request's deadline passed.",
}
_ALWAYS = (400, 403, 405, 408, 431, 500)
_WITH_BODY = (413, 415)
_GENERATING = (429, 499, 503, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. `answer` is what 200 holds: a class, or a media type of text."""

    path: str
    summary: str
    answer: type[BaseModel] | str
    method: str = "get"
    body: type[BaseModel] | None = None
    generates: bool = False
    streams: bool = False
    as_list: bool = False
    needs_key: bool = True
    # 503 with the same answer: a "no" rather than an error.
    may_say_no: bool = False
    shape: Shape = Shape.OPENAI


def _post(path: str, summary: str, body: type[BaseModel], answer: Any, **more: Any) -> Operation:
    return Operation(path=path, summary=summary, answer=answer, method="post", body=body, **more)


_TGI: Mapping[str, Any] = {"shape": Shape.TGI, "generates": True}
_OIP: Mapping[str, Any] = {"shape": Shape.OPEN_INFERENCE}
_V2 = "/v2/models/{name}"
_EVENTS = "text/event-stream"
# Of one event: this version of OpenAPI has no word for a row of them.
_EVENT: Mapping[str, Any] = {
    "type": "object",
    "description": "An event; its data is JSON, or [DONE] at the end of OpenAI's streams.",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
OPERATIONS: tuple[Operation, ...] = (
    _post(
        "/v1/completions",
        "Go on from prompts",
        CompletionBody,
        answers.Completion,
        generates=True,
        streams=True,
    ),
    _post(
        "/v1/chat/completions",
        "Answer a conversation",
        ChatBody,
        answers.ChatCompletion,
        generates=True,
        streams=True,
    ),
    Operation(path="/v1/models", summary="The models served", answer=answers.Models),
    Operation(path="/v1/models/{name}", summary="One model", answer=answers.Model),
    _post("/tokenize", "Text to tokens", TokenizeBody, answers.Tokenized),
    _post("/detokenize", "Tokens to text", DetokenizeBody, answers.Detokenized),
    _post("/generate", "TGI: a whole answer", TgiBody, answers.TgiAnswer, **_TGI),
    _post("/generate_stream", "TGI: an event for each token", TgiBody, _EVENTS, **_TGI),
    _post("/", "TGI: either", TgiBody, answers.TgiAnswer, as_list=True, streams=True, **_TGI),
    Operation(
        path="/v2/health/live",
        summary="Liveness",
        answer=answers.Live,
        needs_key=False,
        **_OIP,
    ),
    Operation(
        path="/v2/health/ready",
        summary="Readiness",
        answer=answers.Ready,
        needs_key=False,
        may_say_no=True,
        **_OIP,
    ),
    Operation(path="/v2", summary="The server", answer=answers.ServerMetadata, **_OIP),
    Operation(path=_V2, summary="A model's tensors", answer=answers.ModelMetadata, **_OIP),
    Operation(
        path=f"{_V2}/ready",
        summary="A model's readiness",
        answer=answers.ModelReady,
        may_say_no=True,
        **_OIP,
    ),
    _post(
        f"{_V2}/infer",
        "Tensors to tensors",
        InferBody,
        answers.Inferred,
        generates=True,
        **_OIP,
    ),
    _post(
        f"{_V2}/generate",
        "A whole answer",
        GenerateBody,
        answers.Generated,
        generates=True,
        **_OIP,
    ),
    _post(
        f"{_V2}/generate_stream",
        "An event for each piece of text",
        GenerateBody,
        _EVENTS,
        generates=True,
        **_OIP,
    ),
    Operation(path="/openapi.json", summary="This document", answer="application/json"),
    Operation(path="/metrics", summary="Prometheus metrics", answer="text/plain"),
    Operation(
        path="/health",
        summary="The process is well",
        answer=answers.Status,
        needs_key=False,
        may_say_no=True,
    ),
    Operation(
        path="/ready",
        summary="A request would be served",
        answer=answers.Status,
        needs_key=False,
        may_say_no=True,
    ),
    Operation(
        path="/version",
        summary="The gateway's version",
        answer=answers.Version,
        needs_key=False,
    ),
)


def document(model: ModelInfo, max_model_len: int) -> dict[str, Any]:
    """The document of a gateway that serves `model` in a context of max_model_len."""
    bodies = {op.body for op in OPERATIONS if op.body is not None}
    shown = {op.answer for op in OPERATIONS if isinstance(op.answer, type)}
    classes = sorted(bodies | shown | set(_ERRORS.values()), key=lambda c: c.__name__)
    _, defined = models_json_schema(
        [(cls, "validation") for cls in classes], ref_template=_REF + "{model}"
    )
    schemas = defined["$defs"]
    # Answers have fields of the same names, which no client sets.
    asked = {name: schema for name, schema in schemas.items() if not hasattr(answers, name)}
    openapi_bounds.apply(asked, model)
    paths: dict[str, Any] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method] = _operation(op, model)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quire",
            "version": VERSION,
            "description": f"Serves {model.name} in a context of {max_model_len} tokens.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(op: Operation, model: ModelInfo) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": op.summary,
        "operationId": f"{op.method}{op.path}".replace("/", "_").replace("{name}", "NAME"),
        "responses": _responses(op),
        # An empty alternative: without keys none is asked for.
        "security": [{"key": []}, {}] if op.needs_key else [],
    }
    if "{name}" in op.path:
        found["parameters"] = [
            {
                "name": "name",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "enum": [model.name]},
            }
        ]
    if op.body is not None:
        content = {"application/json": {"schema": _ref(op.body)}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _responses(op: Operation) -> dict[str, Any]:
    statuses = set(_ALWAYS)
    statuses |= {401} if op.needs_key else set()
    statuses |= {404} if "{name}" in op.path or op.body is not None else set()
    statuses |= set(_WITH_BODY) if op.body is not None else set()
    statuses |= set(_GENERATING) if op.generates else {429} if op.body is not None else set()
    error = {"application/json": {"schema": _ref(_ERRORS[op.shape])}}
    responses: dict[str, Any] = {
        str(status): {"description": _MEANINGS[status], "content": error}
        for status in sorted(statuses)
    }
    good = {"description": "What was asked for.", "content": _content(op)}
    if op.may_say_no:
        responses["503"] = {"description": "The answer is no.", "content": _content(op)}
    return {"200": good, **responses}


def _content(op: Operation) -> dict[str, Any]:
    if isinstance(op.answer, str):
        texts = {"application/json": {"type": "object"}, _EVENTS: _EVENT}
        return {op.answer: {"schema": texts.get(op.answer, {"type": "string"})}}
    schema: dict[str, Any] = _ref(op.answer)
    if op.as_list:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if op.streams:
        content[_EVENTS] = {"schema": _EVENT}
    return content


def _ref(cls: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF + cls.__name__}
