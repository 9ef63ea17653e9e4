"""The shapes of answers, for the OpenAPI document alone: answers are written where they arise."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorObject(_Shape):
    """What went wrong; `code` is a stable word for programs."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(_Shape):
    """An error as OpenAI's clients read it."""

    error: ErrorObject


class TgiError(_Shape):
    """An error as TGI's clients read it."""

    error: str
    error_type: Literal["validation", "unauthorized", "overloaded", "generation"]


class OpenInferenceError(_Shape):
    """An error of the Open Inference Protocol."""

    error: str


class CachedTokens(_Shape):
    """Of the prompt."""

    cached_tokens: int = Field(ge=0)


class UsageObject(_Shape):
    """What an answer has cost."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: CachedTokens


class CompletionChoice(_Shape):
    """The output of one prompt."""

    index: int = Field(ge=0)
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(_Shape):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject


class AnswerMessage(_Shape):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str


class ChatChoice(_Shape):
    """The output."""

    index: int = Field(ge=0)
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None


class ChatCompletion(_Shape):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_token_ids: list[int] | None = None


class Model(_Shape):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(_Shape):
    """The one model served."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(_Shape):
    """The answer of /tokenize."""

    count: int = Field(ge=0)
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(_Shape):
    """The answer of /detokenize."""

    prompt: str


class TgiToken(_Shape):
    """One token of an answer."""

    id: int
    text: str
    logprob: float
    special: bool


class TgiDetails(_Shape):
    """What an answer has cost, and its tokens."""

    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    input_length: int
    seed: int
    prefill: list[Any]
    tokens: list[TgiToken]


class TgiAnswer(_Shape):
    """The answer of /generate."""

    generated_text: str
    details: TgiDetails | None = None


class Cost(_Shape):
    """Why an answer ended, and what it has cost."""

    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int


class Generated(Cost):
    """The answer of generate."""

    model_name: str
    model_version: str
    id: str | None = None
    text_output: str


class OutputTensor(_Shape):
    """The text."""

    name: Literal["text_output"]
    datatype: Literal["BYTES"]
    shape: list[int]
    data: list[str]


class Inferred(_Shape):
    """The answer of infer."""

    model_name: str
    model_version: str
    id: str | None = None
    parameters: Cost
    outputs: list[OutputTensor]


class TensorMetadata(_Shape):
    """A tensor's name and type."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(_Shape):
    """A model's tensors."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(_Shape):
    """What serves."""

    name: str
    version: str
    extensions: list[str]


class ModelReady(_Shape):
    """Whether a model would serve a request."""

    name: str
    ready: bool


class Live(_Shape):
    """The process runs."""

    live: bool


class Ready(_Shape):
    """Whether a request would be served."""

    ready: bool


class Status(_Shape):
    """One word."""

    status: str


class Version(_Shape):
    """The gateway's version."""

    version: str
