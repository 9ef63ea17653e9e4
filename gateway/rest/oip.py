"""The Open Inference Protocol over REST, with the generate extension."""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from gateway.core.errors import GatewayError, RejectReason, RequestRejected
from gateway.core.output import Chunk
from gateway.core.requests import RawRequest
from gateway.core.types import FinishReason, Usage
from gateway.core.wording import shown
from gateway.engine import Engine
from gateway.live import LiveRequest
from gateway.open_inference import (
    INPUT,
    MAX_ELEMENTS,
    MAX_ID_CHARS,
    MAX_TENSORS,
    MODEL_VERSION,
    OUTPUT,
    PLATFORM,
    Parameters,
    Tensor,
    check_outputs,
    metadata_tensors,
    read_tensors,
)
from gateway.rest.auth import Guarded, Open, caller_of
from gateway.rest.bodies import BodyReader
from gateway.rest.errors import Shape, body_of, from_pydantic, to_json
from gateway.rest.events import EventAnswer, WholeAnswer
from gateway.settings import VERSION


class InferTensor(BaseModel):
    """An input tensor. `data` may be nested as its shape says."""

    name: StrictStr
    datatype: StrictStr
    shape: Annotated[list[StrictInt], Field(max_length=MAX_TENSORS)]
    data: Annotated[list[Any], Field(max_length=MAX_ELEMENTS)]
    parameters: dict[str, Any] | None = None


class RequestedOutput(BaseModel):
    """An output tensor that is asked for."""

    name: StrictStr
    parameters: dict[str, Any] | None = None


class InferBody(BaseModel):
    """POST /v2/models/NAME/infer."""

    id: Annotated[StrictStr, Field(max_length=MAX_ID_CHARS)] = ""
    parameters: Parameters | None = None
    inputs: Annotated[list[InferTensor], Field(max_length=MAX_TENSORS)]
    outputs: Annotated[list[RequestedOutput], Field(max_length=MAX_TENSORS)] | None = None

    def to_raw(self, *, model: str, tenant: str, client_id: str) -> RawRequest:
        """For the validator. Raises RequestRejected."""
        check_outputs([output.name for output in self.outputs or ()])
        tensors = [
            Tensor(
                name=given.name,
                datatype=given.datatype,
                shape=given.shape,
                elements=_flat(given.name, given.data),
            )
            for given in self.inputs
        ]
        text, found = read_tensors(tensors, _given(self.parameters))
        if not isinstance(text, str):
            raise RequestRejected(
                RejectReason.INVALID, f"{INPUT}: must hold a string.", param=INPUT
            )
        return _raw(text, found, model, tenant, client_id)


class GenerateBody(BaseModel):
    """POST /v2/models/NAME/generate and generate_stream.

    Parameters stand in `parameters`, or beside the text as Triton has them.
    """

    model_config = ConfigDict(extra="allow")

    id: Annotated[StrictStr, Field(max_length=MAX_ID_CHARS)] = ""
    text_input: StrictStr
    parameters: Parameters | None = None

    def to_raw(self, *, model: str, tenant: str, client_id: str) -> RawRequest:
        """For the validator. Raises RequestRejected."""
        found = {**(self.model_extra or {}), **_given(self.parameters)}
        return _raw(self.text_input, found, model, tenant, client_id)


class OipFramer:
    """Chunks of one generated answer to events, or to its whole body."""

    def __init__(self, body: GenerateBody, model: str) -> None:
        self._start = {"model_name": model, "model_version": MODEL_VERSION}
        if body.id:
            self._start["id"] = body.id

    def events(self, chunk: Chunk, usage: Usage) -> bytes:
        """A frame of text; nothing where there is none to show, but at the end."""
        if chunk.end is None and not chunk.text:
            return b""
        event = self._start | {OUTPUT: chunk.text}
        if chunk.end is not None:
            event |= _cost(chunk.end.reason, usage)
        return b"data: " + to_json(event) + b"\n\n"

    @staticmethod
    def error(error: GatewayError) -> bytes:
        """The end of a stream that can't go on."""
        return b"data: " + to_json(body_of(error, Shape.OPEN_INFERENCE)) + b"\n\n"

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed."""
        return self._start | {OUTPUT: text} | _cost(reason, usage)


def inferred(
    body: InferBody, model: str, text: str, reason: FinishReason, usage: Usage
) -> dict[str, Any]:
    """The answer of infer."""
    answer: dict[str, Any] = {"model_name": model, "model_version": MODEL_VERSION}
    if body.id:
        answer["id"] = body.id
    tensor = {"name": OUTPUT, "datatype": "BYTES", "shape": [1], "data": [text]}
    return answer | {"parameters": _cost(reason, usage), "outputs": [tensor]}


def server_metadata(version: str) -> dict[str, Any]:
    """GET /v2."""
    return {"name": "quire", "version": version, "extensions": []}


def model_metadata(model: str) -> dict[str, Any]:
    """GET /v2/models/NAME."""
    return {
        "name": model,
        "versions": [MODEL_VERSION],
        "platform": PLATFORM,
        "inputs": metadata_tensors("inputs"),
        "outputs": metadata_tensors("outputs"),
    }


def _cost(reason: FinishReason, usage: Usage) -> dict[str, Any]:
    return {
        "finish_reason": reason.name.lower(),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }


def _given(parameters: Parameters | None) -> dict[str, Any]:
    return {} if parameters is None else parameters.model_dump(exclude_unset=True)


def _raw(text: str, found: dict[str, Any], model: str, tenant: str, client_id: str) -> RawRequest:
    try:
        parameters = Parameters.model_validate(found)
    except ValidationError as error:
        raise from_pydantic(error) from error
    return parameters.to_raw(text, model=model, tenant=tenant, client_id=client_id)


def _flat(name: str, data: list[Any]) -> list[Any]:
    """Elements in row-major order. Raises RequestRejected."""
    found: list[Any] = []
    num_lists, waiting = 0, [iter(data)]
    while waiting:
        for element in waiting[-1]:
            if isinstance(element, list):
                num_lists += 1
                waiting.append(iter(element))
                break
            found.append(element)
        else:
            waiting.pop()
        if max(len(found), num_lists) > MAX_ELEMENTS:
            param = shown(name)
            raise RequestRejected(
                RejectReason.INVALID, f"{param}: at most {MAX_ELEMENTS} elements.", param=param
            )
    return found


class OpenInferenceRoutes:
    """Handlers over one engine."""

    def __init__(self, engine: Engine, reader: BodyReader) -> None:
        self._engine = engine
        self._reader = reader

    def routes(self) -> list[Open]:
        """The protocol's paths; a model's name may hold slashes, so the longer ones come first."""
        model = "/v2/models/{name:path}"
        guarded = [
            Guarded("/v2", self.server),
            Guarded(f"{model}/ready", self.model_ready),
            Guarded(f"{model}/infer", self.infer, methods=["POST"]),
            Guarded(f"{model}/generate", self.generate, methods=["POST"]),
            Guarded(f"{model}/generate_stream", self.generate_stream, methods=["POST"]),
            Guarded(model, self.model),
        ]
        health = [Open("/v2/health/live", self.live), Open("/v2/health/ready", self.ready)]
        return [route.shaped(Shape.OPEN_INFERENCE) for route in (*health, *guarded)]

    async def live(self, _: Request) -> Response:
        """GET /v2/health/live."""
        return _json({"live": True})

    async def ready(self, _: Request) -> Response:
        """GET /v2/health/ready."""
        ready = self._engine.ready
        return _json({"ready": ready}, 200 if ready else 503)

    async def server(self, _: Request) -> Response:
        """GET /v2."""
        return _json(server_metadata(VERSION))

    async def model(self, request: Request) -> Response:
        """GET /v2/models/NAME."""
        return _json(model_metadata(self._served(request)))

    async def model_ready(self, request: Request) -> Response:
        """GET /v2/models/NAME/ready."""
        name, ready = self._served(request), self._engine.ready
        return _json({"name": name, "ready": ready}, 200 if ready else 503)

    async def infer(self, request: Request) -> Response:
        """POST /v2/models/NAME/infer."""
        model = self._served(request)
        body = await self._reader.read(request, InferBody)
        live = await self._submit(request, body, model)

        def build(chunks: list[Chunk]) -> object:
            return inferred(body, model, *_outcome(chunks), live.usage)

        return WholeAnswer(self._engine, live, caller_of(request).client_id, build=build)

    async def generate(self, request: Request) -> Response:
        """POST /v2/models/NAME/generate."""
        model = self._served(request)
        body = await self._reader.read(request, GenerateBody)
        live = await self._submit(request, body, model)
        framer = OipFramer(body, model)

        def build(chunks: list[Chunk]) -> object:
            return framer.whole(*_outcome(chunks), live.usage)

        return WholeAnswer(self._engine, live, caller_of(request).client_id, build=build)

    async def generate_stream(self, request: Request) -> Response:
        """POST /v2/models/NAME/generate_stream."""
        model = self._served(request)
        body = await self._reader.read(request, GenerateBody)
        live = await self._submit(request, body, model)
        framer = OipFramer(body, model)
        return EventAnswer(
            self._engine,
            live,
            caller_of(request).client_id,
            frames=lambda chunk: framer.events(chunk, live.usage),
            failure=framer.error,
        )

    async def _submit(
        self, request: Request, body: InferBody | GenerateBody, model: str
    ) -> LiveRequest:
        caller = caller_of(request)
        raw = body.to_raw(model=model, tenant=caller.tenant, client_id=caller.client_id)
        return await self._engine.submit(replace(raw, traceparent=caller.traceparent))

    def _served(self, request: Request) -> str:
        """The model's name, which stands in the path. Raises RequestRejected."""
        name = self._engine.model.name
        if request.path_params["name"] != name:
            raise RequestRejected(
                RejectReason.MODEL_NOT_FOUND, "The model is not served here.", param="model"
            )
        return name


def _outcome(chunks: list[Chunk]) -> tuple[str, FinishReason]:
    end = chunks[-1].end
    assert end is not None
    return "".join(chunk.text for chunk in chunks), end.reason


def _json(value: object, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")
