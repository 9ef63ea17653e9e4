"""The Open Inference Protocol's generated classes to values and back.

Beside gateway.codec, which has quire.v1's, the only module that opens generated classes.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from quire.oip import open_inference_pb2 as pb

from gateway.core.errors import GatewayError, RejectReason, RequestRejected
from gateway.core.requests import RawRequest
from gateway.core.types import FinishReason, Usage
from gateway.core.wording import shown
from gateway.open_inference import (
    DATATYPES,
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
    check_version,
    metadata_tensors,
    read_tensors,
)

_FORMATS: Mapping[str, str] = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP32": "f",
    "FP64": "d",
}
_FIELDS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InferCall:
    """A ModelInferRequest that could be read."""

    raw: RawRequest
    call_id: str


def decode_infer(request: pb.ModelInferRequest, tenant: str) -> InferCall:
    """What a client asks for. Raises RequestRejected."""
    check_version(request.model_version)
    check_outputs([output.name for output in request.outputs[: MAX_TENSORS + 1]])
    if max(len(request.inputs), len(request.outputs), len(request.parameters)) > MAX_TENSORS:
        raise _invalid("inputs", f"at most {MAX_TENSORS} tensors, outputs and parameters")
    num_raw = len(request.raw_input_contents)
    if num_raw and num_raw != len(request.inputs):
        raise _invalid("raw_input_contents", f"{num_raw} contents for {len(request.inputs)} inputs")
    raw = list(request.raw_input_contents)
    tensors = [
        Tensor(
            name=given.name,
            datatype=given.datatype,
            shape=list(given.shape[: MAX_TENSORS + 1]),
            elements=_elements(given, raw[i] if raw else None),
        )
        for i, given in enumerate(request.inputs)
    ]
    named = {name: _value(parameter) for name, parameter in request.parameters.items()}
    text, found = read_tensors(tensors, named)
    try:
        parameters = Parameters.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = str(first["loc"][0])[:100]
        raise _invalid(param, first["msg"]) from error
    client_id = request.id[:MAX_ID_CHARS]
    checked = parameters.to_raw(text, model=request.model_name, tenant=tenant, client_id=client_id)
    return InferCall(raw=checked, call_id=client_id)


def infer_response(
    model: str, call_id: str, text: str, end: tuple[FinishReason, Usage] | None = None
) -> pb.ModelInferResponse:
    """A whole answer, or a piece of one while there is no end."""
    data = text.encode()
    response = pb.ModelInferResponse(
        model_name=model,
        model_version=MODEL_VERSION,
        id=call_id,
        outputs=[pb.ModelInferResponse.InferOutputTensor(name=OUTPUT, datatype="BYTES", shape=[1])],
        raw_output_contents=[struct.pack("<I", len(data)) + data],
    )
    if end is not None:
        reason, usage = end
        response.parameters["finish_reason"].string_param = reason.name.lower()
        response.parameters["prompt_tokens"].int64_param = usage.prompt_tokens
        response.parameters["completion_tokens"].int64_param = usage.completion_tokens
    return response


def stream_response(piece: pb.ModelInferResponse, *, final: bool) -> pb.ModelStreamInferResponse:
    """A piece of a streamed answer; Triton's clients end an answer by the mark of the last."""
    piece.parameters["triton_final_response"].bool_param = final
    return pb.ModelStreamInferResponse(infer_response=piece)


def stream_error(call_id: str, error: GatewayError) -> pb.ModelStreamInferResponse:
    """The end of a streamed answer that failed; the stream goes on."""
    failed = pb.ModelInferResponse(id=call_id)
    failed.parameters["triton_final_response"].bool_param = True
    return pb.ModelStreamInferResponse(error_message=error.message, infer_response=failed)


def live(value: bool) -> pb.ServerLiveResponse:
    """The process runs."""
    return pb.ServerLiveResponse(live=value)


def ready(value: bool) -> pb.ServerReadyResponse:
    """A request would be served."""
    return pb.ServerReadyResponse(ready=value)


def model_ready(value: bool) -> pb.ModelReadyResponse:
    """A request to the model would be served."""
    return pb.ModelReadyResponse(ready=value)


def server_metadata(name: str, version: str) -> pb.ServerMetadataResponse:
    """What serves."""
    return pb.ServerMetadataResponse(name=name, version=version)


def model_metadata(name: str) -> pb.ModelMetadataResponse:
    """The model's tensors."""

    def tensors(kind: str) -> list[pb.ModelMetadataResponse.TensorMetadata]:
        return [
            pb.ModelMetadataResponse.TensorMetadata(**tensor) for tensor in metadata_tensors(kind)
        ]

    return pb.ModelMetadataResponse(
        name=name,
        versions=[MODEL_VERSION],
        platform=PLATFORM,
        inputs=tensors("inputs"),
        outputs=tensors("outputs"),
    )


def _value(parameter: pb.InferParameter) -> Any:
    name = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, name) if name else None


def _elements(given: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Sequence[Any]:
    name = INPUT if given.name == INPUT else given.name[:100]
    if given.datatype not in DATATYPES:
        # The name of the type is refused where all tensors are looked at.
        return ()
    if raw is None:
        found: list[Any] = list(getattr(given.contents, _FIELDS[given.datatype])[:MAX_ELEMENTS])
    elif given.HasField("contents"):
        raise _invalid(name, "contents and raw_input_contents can't both be given")
    elif given.datatype == "BYTES":
        found = _unpack_bytes(name, raw)
    else:
        size = struct.calcsize("<" + _FORMATS[given.datatype])
        if len(raw) % size or len(raw) > size * MAX_ELEMENTS:
            raise _invalid(name, f"{len(raw)} bytes are no list of {given.datatype}")
        found = list(struct.unpack(f"<{len(raw) // size}{_FORMATS[given.datatype]}", raw))
    if given.datatype != "BYTES":
        return found
    try:
        return [data.decode() for data in found]
    except UnicodeDecodeError:
        raise _invalid(name, "must be UTF-8") from None


def _unpack_bytes(name: str, raw: bytes) -> list[bytes]:
    found: list[bytes] = []
    at = 0
    while at < len(raw):
        if len(found) == MAX_ELEMENTS:
            raise _invalid(name, f"at most {MAX_ELEMENTS} elements")
        if at + 4 > len(raw):
            raise _invalid(name, "an element's length is cut off")
        (length,) = struct.unpack_from("<I", raw, at)
        at += 4
        if length > len(raw) - at:
            raise _invalid(name, "an element is shorter than its length says")
        found.append(raw[at : at + length])
        at += length
    return found


def _invalid(param: str, text: str) -> RequestRejected:
    return RequestRejected(RejectReason.INVALID, f"{shown(param)}: {text}.", param=shown(param))
