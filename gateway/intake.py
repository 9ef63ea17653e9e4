"""Requests that have been checked, to live ones that only want admission.

Each sample of a prompt is a request of its own: they share the prompt, the seed and a group, and
differ by their index.
"""

import math
from collections.abc import Callable, Sequence

from gateway.core import validation
from gateway.core.output import OutputAssembler
from gateway.core.requests import CheckedPrompt, CheckedRequest
from gateway.core.types import QueuedRequest, RequestId, Sampling
from gateway.live import LiveRequest
from gateway.ports import Sources, TokenizerPort

# Tokens before the output that its first pieces may need: a character is at most four bytes.
CONTEXT_TOKENS = 6


def equally(_: str) -> float:
    """The share of a tenant where there are no keys."""
    return 1.0


class Intake:
    """Tokenizes, and draws what a client left open. `weight_of` gives a tenant's share."""

    def __init__(
        self,
        tokenizer: TokenizerPort,
        default_deadline_s: float,
        weight_of: Callable[[str], float],
        sources: Sources,
    ) -> None:
        self._tokenizer = tokenizer
        self._life_ms = math.ceil(default_deadline_s * 1000)
        self._weight_of = weight_of
        self._sources = sources

    async def prepare(
        self, checked: Sequence[CheckedRequest], max_model_len: int
    ) -> list[LiveRequest]:
        """All samples of all prompts, in the order of the choices. Raises RequestRejected."""
        arrived_s = self._sources.clock_s()
        lives: list[LiveRequest] = []
        num_tokens = 0
        for request in checked:
            prompt = await self.encode(request.prompt)
            num_tokens += len(prompt) * request.n
            validation.check_samples(request.n, num_tokens)
            lives += await self._samples(request, prompt, max_model_len, arrived_s)
        return lives

    async def encode(self, prompt: CheckedPrompt) -> Sequence[int]:
        """Its tokens."""
        if prompt.messages is not None:
            return await self._tokenizer.encode_chat(
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
            )
        if prompt.text is not None:
            return await self._tokenizer.encode_text(
                prompt.text, add_special_tokens=prompt.add_special_tokens
            )
        return prompt.token_ids or ()

    async def _samples(
        self,
        checked: CheckedRequest,
        prompt: Sequence[int],
        max_model_len: int,
        arrived_s: float,
    ) -> list[LiveRequest]:
        random_seed = int.from_bytes(self._sources.random_bytes(8))
        sampling = validation.fit(checked, len(prompt), max_model_len, random_seed=random_seed)
        skip = checked.skip_special_tokens
        echo_text = None
        if checked.echo:
            echo_text = checked.prompt.text
            if echo_text is None:
                echo_text = await self._tokenizer.decode_ids(prompt, skip_special_tokens=skip)
        # A completion goes on in its prompt's text, an answer in a chat begins a text of its own.
        context = () if checked.prompt.messages is not None else tuple(prompt[-CONTEXT_TOKENS:])
        group = self._sources.random_bytes(16) if checked.n > 1 else b""
        return [
            LiveRequest(
                self._queued(checked, prompt, sampling, group, index),
                self._assembler(checked, sampling, context),
                arrived_s,
                echo_text=echo_text,
                skip_special_tokens=skip,
                context=context,
            )
            for index in range(checked.n)
        ]

    def _queued(
        self,
        checked: CheckedRequest,
        prompt: Sequence[int],
        sampling: Sampling,
        group: bytes,
        index: int,
    ) -> QueuedRequest:
        return QueuedRequest(
            request_id=RequestId(self._sources.random_bytes(16)),
            attempt=1,
            prompt_token_ids=prompt,
            sampling=sampling,
            priority=checked.priority,
            # A client may ask for less time, not for more.
            life_ms=min(self._life_ms, checked.deadline_ms or self._life_ms),
            cache_salt=checked.cache_salt,
            traceparent=checked.traceparent,
            tenant=checked.tenant,
            tenant_weight=self._weight_of(checked.tenant),
            sample_group=group,
            sample_index=index,
        )

    def _assembler(
        self, checked: CheckedRequest, sampling: Sampling, context: Sequence[int]
    ) -> OutputAssembler:
        return OutputAssembler(
            self._tokenizer.detokenizer(
                skip_special_tokens=checked.skip_special_tokens, after=context
            ),
            stops=checked.stops,
            stop_token_ids=sampling.stop_token_ids,
            min_tokens=sampling.min_tokens,
            include_stop=checked.include_stop_str_in_output,
            hidden=checked.prompt_only,
        )
