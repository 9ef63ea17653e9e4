"""TGI's interface: /generate and /generate_stream, and the root path that its clients post to.

Defaults are TGI's: greedy unless sampling is asked for, 100 new tokens, the stop string is part of
the text. What a client of TGI may name and is not built is refused by name.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr
from starlette.requests import Request
from starlette.responses import Response

from gateway.core.detokenizer import Detokenizer
from gateway.core.errors import GatewayError
from gateway.core.output import Chunk
from gateway.core.requests import RawRequest
from gateway.core.types import FinishReason
from gateway.core.validation import refuse_unbuilt
from gateway.engine import Engine
from gateway.live import LiveRequest
from gateway.rest.auth import Guarded, Open, caller_of
from gateway.rest.bodies import BodyReader
from gateway.rest.errors import Shape, body_of, to_json
from gateway.rest.events import EventAnswer, WholeAnswer

DEFAULT_NEW_TOKENS = 100
_Number = Annotated[float, Field(strict=True)]
# Values that mean a parameter is not used.
NOT_BUILT: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "typical_p": (1.0,),
    "truncate": (),
    "watermark": (False,),
    "decoder_input_details": (False,),
    "top_n_tokens": (0,),
    "grammar": (),
    "adapter_id": (),
}


class TgiParameters(BaseModel):
    """How to generate."""

    model_config = ConfigDict(extra="allow")

    max_new_tokens: StrictInt | None = None
    do_sample: StrictBool | None = None
    temperature: _Number | None = None
    top_k: StrictInt | None = None
    top_p: _Number | None = None
    repetition_penalty: _Number | None = None
    frequency_penalty: _Number | None = None
    seed: StrictInt | None = None
    stop: Annotated[list[StrictStr], Field(max_length=1024)] | None = None
    return_full_text: StrictBool | None = None
    details: StrictBool | None = None

    @property
    def samples(self) -> bool:
        """Sampling is asked for, by its name or by one of its parameters."""
        warps = self.temperature not in (None, 1.0) or self.top_p not in (None, 1.0)
        return bool(self.do_sample) or warps or self.top_k not in (None, 0)


class TgiBody(BaseModel):
    """POST /generate, POST /generate_stream, POST /."""

    inputs: StrictStr
    parameters: TgiParameters | None = None
    stream: StrictBool | None = None

    @property
    def given(self) -> TgiParameters:
        """The parameters, those left out as well."""
        return self.parameters or TgiParameters()

    def to_raw(self, *, stream: bool, tenant: str, client_id: str) -> RawRequest:
        """For the validator. Raises RequestRejected."""
        given = self.given
        refuse_unbuilt(given.model_extra or {}, NOT_BUILT, "parameters.")
        samples = given.samples
        unset = 1.0 if samples else 0.0
        new_tokens = given.max_new_tokens
        return RawRequest(
            text=self.inputs,
            prompt_name="inputs",
            max_tokens=DEFAULT_NEW_TOKENS if new_tokens is None else new_tokens,
            max_tokens_name="max_new_tokens",
            temperature=unset if given.temperature is None or not samples else given.temperature,
            top_k=given.top_k or 0,
            top_p=1.0 if given.top_p is None else given.top_p,
            min_p=0.0,
            repetition_penalty=1.0
            if given.repetition_penalty is None
            else given.repetition_penalty,
            frequency_penalty=given.frequency_penalty,
            seed=_signed(given.seed),
            stop=given.stop or (),
            include_stop_str_in_output=True,
            num_logprobs=0 if stream or given.details else None,
            client_request_id=client_id,
            tenant=tenant,
        )


class TgiFramer:
    """Chunks of one answer to TGI's events, or to its whole body."""

    def __init__(
        self,
        body: TgiBody,
        live: LiveRequest,
        eos_token_ids: tuple[int, ...],
        detokenizer: Detokenizer,
    ) -> None:
        self._live = live
        self._detokenizer = detokenizer
        self._details = bool(body.given.details)
        self._eos = frozenset(eos_token_ids)
        self._pieces = [body.inputs] if body.given.return_full_text else []
        self._index = 0
        self._last_id = 0

    def events(self, chunk: Chunk) -> bytes:
        """A frame for each token."""
        tokens = self._tokens(chunk)
        self._pieces.append(chunk.text)
        if not tokens and (chunk.end is not None or chunk.text):
            # Text that was held back, or an end that came on its own.
            special = not chunk.text
            tokens = [{"id": self._last_id, "text": chunk.text, "logprob": 0.0, "special": special}]
            self._index += 1
        frames = []
        first = self._index - len(tokens) + 1
        for i, token in enumerate(tokens):
            last = chunk.end is not None and i == len(tokens) - 1
            event = {"index": first + i, "token": token, "generated_text": None, "details": None}
            if last:
                event["generated_text"] = "".join(self._pieces)
                event["details"] = self._summary(chunk) if self._details else None
            frames.append(b"data:" + to_json(event) + b"\n\n")
        return b"".join(frames)

    @staticmethod
    def error(error: GatewayError) -> bytes:
        """The end of a stream that can't go on."""
        return b"data:" + to_json(body_of(error, Shape.TGI)) + b"\n\n"

    def whole(self, chunks: list[Chunk]) -> dict[str, Any]:
        """The answer that is not streamed; the last chunk has the end."""
        tokens = [token for chunk in chunks for token in self._tokens(chunk)]
        text = "".join([*self._pieces, *(chunk.text for chunk in chunks)])
        answer: dict[str, Any] = {"generated_text": text}
        if self._details:
            answer["details"] = self._summary(chunks[-1]) | {"prefill": [], "tokens": tokens}
        return answer

    def _tokens(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Each with its part of the chunk's text: clients pass over that of special tokens."""
        tokens: list[dict[str, Any]] = []
        left, bearer = chunk.text, 0
        for i, token in enumerate(chunk.token_ids):
            size = len(self._detokenizer.push(token))
            logprob = chunk.logprobs[i].logprob if chunk.logprobs else 0.0
            special = token in self._eos
            tokens.append(
                {"id": token, "text": left[:size], "logprob": logprob, "special": special}
            )
            left = left[size:]
            bearer = bearer if special else i
        if tokens and left:
            # The end of a character that never came, or what the model's decoder adds at the end.
            tokens[bearer]["text"] += left
            tokens[bearer]["special"] = False
        self._index += len(tokens)
        self._last_id = chunk.token_ids[-1] if tokens else self._last_id
        return tokens

    def _summary(self, chunk: Chunk) -> dict[str, Any]:
        assert chunk.end is not None
        usage = self._live.usage
        if chunk.end.reason is FinishReason.LENGTH:
            reason = "length"
        else:
            reason = "eos_token" if self._last_id in self._eos else "stop_sequence"
        return {
            "finish_reason": reason,
            "generated_tokens": usage.completion_tokens,
            "input_length": usage.prompt_tokens,
            "seed": self._live.queued.sampling.seed,
        }


def _signed(seed: int | None) -> int | None:
    """TGI's seeds have 64 bits without a sign; the noise is keyed by the bits."""
    return seed - 2**64 if seed is not None and 2**63 <= seed < 2**64 else seed


class TgiRoutes:
    """Handlers over one engine."""

    def __init__(self, engine: Engine, reader: BodyReader) -> None:
        self._engine = engine
        self._reader = reader

    def routes(self) -> list[Open]:
        """TGI's paths."""
        return [
            Guarded("/generate", self.generate, methods=["POST"]).shaped(Shape.TGI),
            Guarded("/generate_stream", self.generate_stream, methods=["POST"]).shaped(Shape.TGI),
            Guarded("/", self.either, methods=["POST"]).shaped(Shape.TGI),
        ]

    async def generate(self, request: Request) -> Response:
        """POST /generate: the whole answer."""
        return await self._answer(request, await self._reader.read(request, TgiBody), stream=False)

    async def generate_stream(self, request: Request) -> Response:
        """POST /generate_stream: an event for each token."""
        return await self._answer(request, await self._reader.read(request, TgiBody), stream=True)

    async def either(self, request: Request) -> Response:
        """POST /: a stream if `stream` says so, else a list of one answer."""
        body = await self._reader.read(request, TgiBody)
        return await self._answer(request, body, stream=bool(body.stream), as_list=True)

    async def _answer(
        self, request: Request, body: TgiBody, *, stream: bool, as_list: bool = False
    ) -> Response:
        caller = caller_of(request)
        raw = body.to_raw(stream=stream, tenant=caller.tenant, client_id=caller.client_id)
        live = await self._engine.submit(replace(raw, traceparent=caller.traceparent))
        eos = self._engine.model.eos_token_ids
        framer = TgiFramer(body, live, eos, self._engine.detokenizer(after=live.context))
        if stream:
            return EventAnswer(
                self._engine,
                live,
                caller.client_id,
                frames=framer.events,
                failure=framer.error,
            )

        def build(chunks: list[Chunk]) -> object:
            return [framer.whole(chunks)] if as_list else framer.whole(chunks)

        return WholeAnswer(self._engine, live, caller.client_id, build=build)
