"""litellm: its functions and its router over an OpenAI-compatible server, with its own errors."""

import asyncio
import os
import sys

# Before the import: otherwise it asks a server elsewhere for prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from checks import (
    API_KEY,
    HAS_KEYS,
    MESSAGES,
    MODEL,
    PROMPTS,
    V1,
    cancelled,
    check,
    equal,
    main,
    raises,
)

litellm.telemetry = False
SERVER = {"api_base": V1, "api_key": API_KEY, "num_retries": 0, "max_retries": 0}
CHAT = {
    "model": f"openai/{MODEL}",
    "messages": MESSAGES,
    "temperature": 0,
    "max_tokens": 8,
    **SERVER,
}
TEXT = {"model": f"text-completion-openai/{MODEL}", "temperature": 0, "max_tokens": 8, **SERVER}


@check
def chat() -> None:
    """A chat has an answer, a reason and a usage."""
    got = litellm.completion(**CHAT)
    assert "Paris" in got.choices[0].message.content
    equal(got.usage.total_tokens, got.usage.prompt_tokens + got.usage.completion_tokens)


@check
def chat_stream() -> None:
    """A streamed chat is the whole one in pieces; its chunks rebuild it with its usage."""
    whole = litellm.completion(**CHAT)
    chunks = list(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    equal(text, whole.choices[0].message.content)
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    equal(rebuilt.choices[0].message.content, text)
    equal(rebuilt.usage.completion_tokens, whole.usage.completion_tokens)


@check
def text() -> None:
    """Completions run whole, streamed and with several prompts."""
    whole = litellm.text_completion(prompt=PROMPTS[0], **TEXT)
    chunks = litellm.text_completion(prompt=PROMPTS[0], stream=True, **TEXT)
    equal("".join(c.choices[0].text or "" for c in chunks), whole.choices[0].text)
    equal(len(litellm.text_completion(prompt=PROMPTS, **TEXT).choices), len(PROMPTS))


@check
def parameters() -> None:
    """Stop, seed, log probabilities and penalties are passed on."""
    whole = litellm.completion(**CHAT).choices[0].message.content
    stop = whole[2:4]
    cut = litellm.completion(**CHAT, stop=[stop]).choices[0]
    equal((cut.message.content, cut.finish_reason), (whole[: whole.index(stop)], "stop"))
    hot = {**CHAT, "temperature": 1.5, "seed": 7, "presence_penalty": 0.5}
    equal(*(litellm.completion(**hot).choices[0].message.content for _ in range(2)))
    scored = litellm.completion(**CHAT, logprobs=True, top_logprobs=2)
    equal(len(scored.choices[0].logprobs.content), scored.usage.completion_tokens)


@check
def errors() -> None:
    """Errors are litellm's own types."""
    wrong = raises(
        litellm.BadRequestError, lambda: litellm.completion(**{**CHAT, "temperature": -1})
    )
    assert "temperature" in str(wrong)
    raises(litellm.BadRequestError, lambda: litellm.completion(**CHAT, n=129))
    raises(litellm.NotFoundError, lambda: litellm.completion(**{**CHAT, "model": "openai/another"}))
    if HAS_KEYS:
        stranger = {**CHAT, "api_key": "wrong"}
        raises(litellm.AuthenticationError, lambda: litellm.completion(**stranger))


@check
def router() -> None:
    """Its router serves asynchronous calls at once."""
    entry = {"model_name": "quire", "litellm_params": {"model": f"openai/{MODEL}", **SERVER}}
    routed = litellm.Router(model_list=[entry])

    async def run() -> list[str]:
        calls = (
            routed.acompletion(model="quire", messages=MESSAGES, temperature=0, max_tokens=8)
            for _ in range(4)
        )
        return [got.choices[0].message.content for got in await asyncio.gather(*calls)]

    assert all("Paris" in answer for answer in asyncio.run(run()))


@check
def leaving() -> None:
    """A stream that is left early is cancelled."""

    async def run() -> None:
        longer = {**CHAT, "max_tokens": 2000, "stream": True, "extra_body": {"ignore_eos": True}}
        stream = await litellm.acompletion(**longer)
        count = 0
        async for _ in stream:
            count += 1
            if count == 3:
                break
        await stream.aclose()

    with cancelled():
        asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
