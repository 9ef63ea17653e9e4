"""The validator's bounds in the words of JSON Schema, put onto the fields of request bodies.

The bodies' classes hold types, the validator holds values. Here they meet; a test sends each bound,
and one more, to the validator itself.
"""

from collections.abc import Mapping
from typing import Any

from gateway import open_inference
from gateway.core import validation as v
from gateway.core.types import ModelInfo
from gateway.rest import tgi, tokenize

_INT64 = 2**63
_INT32 = 2**31
ROLES = ("system", "developer", "user", "assistant")
Bounds = Mapping[str, Mapping[str, Any]]


def of_fields(model: ModelInfo) -> dict[str, Bounds]:
    """By name of a field, by JSON type of its value: what holds for every body that has it."""
    ids = {"minimum": 0, "maximum": model.vocab_size - 1}
    stop = {"minLength": 1, "maxLength": v.MAX_STOP_CHARS}
    penalty = {"number": {"minimum": -v.MAX_PENALTY, "maximum": v.MAX_PENALTY}}
    name = {"maxLength": v.MAX_NAME_CHARS, "pattern": r"^[^\u0000]*$"}
    return {
        "model": {"string": {"enum": ["", model.name]}},
        "max_tokens": {"integer": {"minimum": 1, "maximum": model.max_model_len}},
        "max_completion_tokens": {"integer": {"minimum": 1, "maximum": model.max_model_len}},
        "max_new_tokens": {"integer": {"minimum": 1, "maximum": model.max_model_len}},
        "min_tokens": {"integer": {"minimum": 0, "maximum": _INT32 - 1}},
        "temperature": {"number": {"minimum": 0.0, "maximum": v.MAX_TEMPERATURE}},
        "top_p": {"number": {"exclusiveMinimum": 0.0, "maximum": 1.0}},
        "top_k": {"integer": {"minimum": -1, "maximum": _INT64 - 1}},
        "min_p": {"number": {"minimum": 0.0, "maximum": 1.0}},
        "seed": {"integer": {"minimum": -_INT64, "maximum": _INT64 - 1}},
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "repetition_penalty": {
            "number": {"minimum": v.MIN_REPETITION, "maximum": v.MAX_REPETITION}
        },
        "logit_bias": {
            "object": {
                "maxProperties": v.MAX_BIASES,
                "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
                "additionalProperties": {
                    "type": "number",
                    "minimum": -v.MAX_BIAS,
                    "maximum": v.MAX_BIAS,
                },
            }
        },
        "logprobs": {"integer": {"minimum": 0, "maximum": v.MAX_LOGPROBS}},
        "top_logprobs": {"integer": {"minimum": 0, "maximum": v.MAX_LOGPROBS}},
        "stop": {"string": stop, "array": {"maxItems": v.MAX_STOPS}},
        "stop_words": {"string": stop, "array": {"maxItems": v.MAX_STOPS}},
        "stop_token_ids": {"array": {"maxItems": v.MAX_STOP_TOKENS}, "integer": ids},
        "n": {"integer": {"minimum": 1, "maximum": v.MAX_SAMPLES}},
        "best_of": {"integer": {"description": "Must be equal to n."}},
        "priority": {"integer": {"minimum": -_INT32, "maximum": _INT32 - 1}},
        "deadline_ms": {"integer": {"minimum": 1, "maximum": _INT64 - 1}},
        "user": {"string": name},
        "cache_salt": {"string": {**name, "minLength": 1}},
        "tokens": {"integer": ids},
        "messages": {"array": {"minItems": 1}},
        "role": {"string": {"enum": list(ROLES)}},
        "datatype": {"string": {"enum": list(open_inference.DATATYPES)}},
        "shape": {"integer": {"minimum": 0, "maximum": open_inference.MAX_ELEMENTS}},
    }


def of_bodies(model: ModelInfo) -> dict[str, dict[str, Bounds]]:
    """Where a body differs from the others."""
    ids = {"minimum": 0, "maximum": model.vocab_size - 1}
    return {
        "CompletionBody": {
            # 0 is for an echo of the prompt alone.
            "max_tokens": {"integer": {"minimum": 0, "maximum": model.max_model_len}},
            "prompt": {"integer": ids},
        },
        "TgiParameters": {"seed": {"integer": {"minimum": -_INT64, "maximum": 2 * _INT64 - 1}}},
        "TextPart": {"type": {"string": {"enum": ["text"]}}},
        "TgiBody": {"inputs": {"string": {"minLength": 1}}},
        "GenerateBody": {"text_input": {"string": {"minLength": 1}}},
        "InferBody": {"inputs": {"array": {"minItems": 1}}},
        "RequestedOutput": {"name": {"string": {"enum": [open_inference.OUTPUT]}}},
    }


def not_built(body: str) -> Mapping[str, tuple[object, ...]]:
    """Fields that are known and refused, with the values that mean they are not used."""
    tables = {
        "TgiParameters": tgi.NOT_BUILT,
        "TokenizeBody": tokenize.NOT_BUILT,
        "Parameters": open_inference.NOT_BUILT,
    }
    common = v.NOT_BUILT if body in ("CompletionBody", "ChatBody") else {}
    return tables.get(body, common)


def apply(schemas: dict[str, Any], model: ModelInfo) -> None:
    """Writes all bounds into the schemas of the bodies, by their names."""
    common, special = of_fields(model), of_bodies(model)
    for body, schema in schemas.items():
        properties = schema.get("properties", {})
        for field, shape in properties.items():
            bounds = special.get(body, {}).get(field) or common.get(field)
            if bounds:
                _narrow(shape, bounds)
        for field, neutral in not_built(body).items():
            properties.setdefault(
                field,
                {
                    "enum": [*neutral, None],
                    "description": "Not supported yet: a value other than these is refused.",
                },
            )


def _narrow(shape: dict[str, Any], bounds: Bounds) -> None:
    """Also inside lists: what holds for a string holds for each string of a list."""
    for branch in shape.get("anyOf", [shape]):
        branch.update(bounds.get(branch.get("type"), {}))
        if "items" in branch:
            _narrow(branch["items"], bounds)
