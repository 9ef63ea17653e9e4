"""What the Open Inference Protocol's two front ends share: tensors and parameters to a request.

A text comes as the BYTES tensor `text_input` with one element and goes as `text_output`. Sampling
parameters come as request parameters or as tensors of one element, under the names of the REST
interface. Names that are not known are ignored; what is known but not built is refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from gateway.core import validation
from gateway.core.errors import RejectReason, RequestRejected
from gateway.core.requests import RawRequest
from gateway.core.wording import shown

# Answers here are one text.
NOT_BUILT: Mapping[str, tuple[object, ...]] = {**validation.NOT_BUILT, "n": (1,), "best_of": (1,)}
INPUT, OUTPUT = "text_input", "text_output"
MODEL_VERSION = "1"
PLATFORM = "quire"
MAX_TENSORS = 64
MAX_ELEMENTS = 1024
MAX_ID_CHARS = 128
INTEGERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
FLOATS = ("FP32", "FP64")
DATATYPES = (*INTEGERS, *FLOATS, "BOOL", "BYTES")
# Parameters as the model's metadata names them.
WHOLE_NUMBERS = ("max_tokens", "min_tokens", "top_k", "seed")
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
_Number = Annotated[float, Field(strict=True)]
_Stop = StrictStr | Annotated[list[StrictStr], Field(max_length=MAX_ELEMENTS)] | None


class Parameters(BaseModel):
    """Sampling parameters. Values are the validator's business."""

    model_config = ConfigDict(extra="allow")

    max_tokens: StrictInt | None = None
    min_tokens: StrictInt | None = None
    temperature: _Number | None = None
    top_p: _Number | None = None
    top_k: StrictInt | None = None
    min_p: _Number | None = None
    presence_penalty: _Number | None = None
    frequency_penalty: _Number | None = None
    repetition_penalty: _Number | None = None
    seed: StrictInt | None = None
    stop: _Stop = None
    stop_words: _Stop = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    priority: StrictInt | None = None
    deadline_ms: StrictInt | None = None
    cache_salt: StrictStr | None = None

    def to_raw(self, text: str, *, model: str, tenant: str, client_id: str) -> RawRequest:
        """For the validator."""
        stops = [s for given in (self.stop, self.stop_words) for s in _as_list(given)]
        validation.refuse_unbuilt(self.model_extra or {}, NOT_BUILT)
        return RawRequest(
            model=model,
            text=text,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            stop=stops,
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            priority=self.priority,
            deadline_ms=self.deadline_ms,
            cache_salt=self.cache_salt,
            client_request_id=client_id,
            tenant=tenant,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An input tensor, its elements in row-major order."""

    name: str
    datatype: str
    shape: Sequence[int]
    elements: Sequence[Any]


def read_tensors(
    tensors: Sequence[Tensor], parameters: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The text, and the parameters with those that came as tensors. Raises RequestRejected."""
    found = dict(parameters)
    text: str | None = None
    for tensor in tensors:
        _check(tensor)
        if tensor.name == INPUT:
            if text is not None:
                raise _invalid(INPUT, "stands more than once")
            if tensor.datatype != "BYTES":
                raise _invalid(INPUT, f"must be BYTES, not {tensor.datatype}")
            if len(tensor.elements) != 1:
                raise _invalid(INPUT, f"must hold one element, not {len(tensor.elements)}")
            text = tensor.elements[0]
        elif tensor.name in ("stop", "stop_words"):
            found[tensor.name] = list(tensor.elements)
        elif len(tensor.elements) == 1:
            found[tensor.name] = tensor.elements[0]
        else:
            raise _invalid(
                tensor.name, f"a parameter has one element, this tensor {len(tensor.elements)}"
            )
    if text is None:
        raise _invalid(INPUT, "this input tensor is needed")
    return text, found


def check_outputs(names: Sequence[str]) -> None:
    """Only what exists can be asked for. Raises RequestRejected."""
    for name in names:
        if name != OUTPUT:
            raise _invalid(shown(name), f"is no output of this model; {OUTPUT} is the only one")


def check_version(version: str) -> None:
    """There is one version. Raises RequestRejected."""
    if version not in ("", MODEL_VERSION):
        raise RequestRejected(
            RejectReason.MODEL_NOT_FOUND,
            f"The model's only version is {MODEL_VERSION}.",
            param="model_version",
        )


def _check(tensor: Tensor) -> None:
    name = tensor.name
    if tensor.datatype not in DATATYPES:
        raise _invalid(shown(name), f"the data type must be one of {', '.join(DATATYPES)}")
    size = 1
    for length in tensor.shape:
        if not 0 <= length <= MAX_ELEMENTS:
            raise _invalid(shown(name), f"each dimension must be from 0 to {MAX_ELEMENTS}")
        size = min(size * length, MAX_ELEMENTS + 1)
    if size != len(tensor.elements) or not tensor.shape:
        raise _invalid(shown(name), f"{len(tensor.elements)} elements do not fit the shape")


def _as_list(value: str | list[str] | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _invalid(param: str, text: str) -> RequestRejected:
    return RequestRejected(RejectReason.INVALID, f"{param}: {text}.", param=param)


def metadata_tensors(kind: str) -> list[dict[str, Any]]:
    """Name, data type and shape of each tensor of `kind`, inputs or outputs."""
    if kind == "outputs":
        return [{"name": OUTPUT, "datatype": "BYTES", "shape": [1]}]
    tensors = [{"name": INPUT, "datatype": "BYTES", "shape": [1]}]
    tensors += [{"name": "stop", "datatype": "BYTES", "shape": [-1]}]
    tensors += [{"name": name, "datatype": "INT64", "shape": [1]} for name in WHOLE_NUMBERS]
    tensors += [{"name": name, "datatype": "FP64", "shape": [1]} for name in NUMBERS]
    return tensors
