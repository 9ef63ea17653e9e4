"""vLLM's /tokenize and /detokenize. Nothing is queued; the prompt is checked like any other."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr
from starlette.requests import Request
from starlette.responses import Response

from gateway.core.errors import RejectReason, RequestRejected
from gateway.core.requests import RawRequest
from gateway.core.validation import refuse_unbuilt
from gateway.engine import Engine
from gateway.rest.auth import Guarded, Open, caller_of
from gateway.rest.bodies import BodyReader
from gateway.rest.errors import to_json
from gateway.rest.schemas import Messages, to_messages

MAX_TOKENS = 2**20
NOT_BUILT: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "truncate_prompt_tokens": (),
}


class TokenizeBody(BaseModel):
    """POST /tokenize: a prompt or a conversation."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr = ""
    prompt: StrictStr | None = None
    messages: Messages | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    return_token_strs: StrictBool | None = None

    def to_raw(self, *, tenant: str, client_id: str) -> RawRequest:
        """For the validator. Raises RequestRejected."""
        refuse_unbuilt(self.model_extra or {}, NOT_BUILT)
        chat = self.messages is not None
        if chat and self.add_special_tokens:
            raise RequestRejected(
                RejectReason.UNSUPPORTED,
                "add_special_tokens is not supported with messages yet: the chat template writes "
                "them.",
                param="add_special_tokens",
            )
        return RawRequest(
            model=self.model,
            text=self.prompt,
            messages=None if self.messages is None else to_messages(self.messages),
            add_special_tokens=self.add_special_tokens is not False,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            tenant=tenant,
            client_request_id=client_id,
        )


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model: StrictStr = ""
    tokens: Annotated[list[StrictInt], Field(max_length=MAX_TOKENS)]


def tokenized(tokens: list[int], max_model_len: int, strings: list[str] | None) -> dict[str, Any]:
    """The answer of /tokenize."""
    return {
        "count": len(tokens),
        "max_model_len": max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }


class TokenizeRoutes:
    """Handlers over one engine."""

    def __init__(self, engine: Engine, reader: BodyReader) -> None:
        self._engine = engine
        self._reader = reader

    def routes(self) -> list[Open]:
        """vLLM's paths."""
        return [
            Guarded("/tokenize", self.tokenize, methods=["POST"]),
            Guarded("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        caller = caller_of(request)
        body = await self._reader.read(request, TokenizeBody)
        raw = body.to_raw(tenant=caller.tenant, client_id=caller.client_id)
        tokens = await self._engine.encode(raw)
        strings = None
        if body.return_token_strs:
            spell = self._engine.token_bytes
            strings = [spell(token).decode("utf-8", "replace") for token in tokens]
        answer = tokenized(tokens, self._engine.max_model_len, strings)
        return Response(to_json(answer), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        body = await self._reader.read(request, DetokenizeBody)
        if body.model not in ("", self._engine.model.name):
            raise RequestRejected(
                RejectReason.MODEL_NOT_FOUND, "The model is not served here.", param="model"
            )
        prompt = await self._engine.decode(body.tokens)
        return Response(to_json({"prompt": prompt}), media_type="application/json")
