"""The openai package for Python: both interfaces, streamed and whole, and its own error types."""

import asyncio
import sys

import openai
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
from openai import AsyncOpenAI, OpenAI

client = OpenAI(base_url=V1, api_key=API_KEY, max_retries=0, timeout=120)
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 8}


@check
def models() -> None:
    """Models are listed, and found by name."""
    equal([m.id for m in client.models.list()], [MODEL])
    equal(client.models.retrieve(MODEL).object, "model")
    raises(openai.NotFoundError, lambda: client.models.retrieve("another"))


@check
def chat() -> None:
    """A chat has an answer, a reason and a usage that adds up."""
    got = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert "Paris" in got.choices[0].message.content
    equal(
        (got.object, got.model, got.choices[0].message.role),
        ("chat.completion", MODEL, "assistant"),
    )
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    assert got.usage.prompt_tokens_details.cached_tokens >= 0
    assert got._request_id


@check
def chat_stream() -> None:
    """A streamed chat is the whole one in pieces, with the usage at its end."""
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(messages=MESSAGES, **GREEDY, **options))
    equal(chunks[0].choices[0].delta.role, "assistant")
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    equal(text, whole.choices[0].message.content)
    equal(
        [c.choices[0].finish_reason for c in chunks if c.choices][-1],
        whole.choices[0].finish_reason,
    )
    equal(chunks[-1].choices, [])
    equal(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens)
    equal(len({c.id for c in chunks}), 1)


@check
def stream_helper() -> None:
    """The SDK's own stream helper gathers the whole answer."""
    with client.chat.completions.stream(messages=MESSAGES, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds, kinds
    equal(
        final.choices[0].message.content,
        client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message.content,
    )


@check
def conversation() -> None:
    """Developer and system turns, parts of text and a null content are taken."""
    messages = [
        {"role": "developer", "content": "Answer briefly."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}],
        },
        {"role": "assistant", "content": None},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    got = client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=4, max_tokens=9
    )
    assert got.usage.completion_tokens <= 4


@check
def several_prompts() -> None:
    """Several prompts give each its own answer, as text and as token ids, whole and streamed."""
    one_by_one = [client.completions.create(prompt=p, **GREEDY).choices[0].text for p in PROMPTS]
    together = client.completions.create(prompt=PROMPTS, **GREEDY)
    equal([c.index for c in together.choices], [0, 1, 2])
    equal([c.text for c in together.choices], one_by_one)
    texts = ["", "", ""]
    for chunk in client.completions.create(prompt=PROMPTS, stream=True, **GREEDY):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    equal(texts, one_by_one)
    ids = [[504, 3575, 282], [504, 3575]]
    equal(len(client.completions.create(prompt=ids, **GREEDY).choices), 2)
    equal(client.completions.create(prompt=ids[0], **GREEDY).usage.prompt_tokens, 3)


@check
def several_samples() -> None:
    """Each its own choice, whole and streamed, the same again under one seed; the prompt once."""
    asked = {"model": MODEL, "max_tokens": 8, "seed": 5, "temperature": 1.5, "n": 4}
    whole = client.chat.completions.create(messages=MESSAGES, **asked)
    texts = [choice.message.content for choice in whole.choices]
    equal([choice.index for choice in whole.choices], [0, 1, 2, 3])
    assert len(set(texts)) > 1, texts
    one = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    equal(whole.usage.prompt_tokens, one.usage.prompt_tokens)
    streamed = [""] * 4
    for chunk in client.chat.completions.create(messages=MESSAGES, stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    equal(streamed, texts)
    both = client.completions.create(prompt=PROMPTS[:2], n=2, best_of=2, **GREEDY)
    first, second, third, fourth = (choice.text for choice in both.choices)
    equal((first, third), (second, fourth))


@check
def stops() -> None:
    """A stop string ends the answer before it, or behind it when asked for."""

    def text(**more: object) -> tuple[str, str]:
        got = client.completions.create(
            prompt="One, two, three,", **{**GREEDY, "max_tokens": 16}, **more
        )
        return got.choices[0].text, got.choices[0].finish_reason

    whole, _ = text()
    at = whole[2:5]
    equal(text(stop=[at]), (whole[: whole.index(at)], "stop"))
    equal(
        text(stop=at, extra_body={"include_stop_str_in_output": True}),
        (whole[: whole.index(at) + 3], "stop"),
    )


@check
def seeds() -> None:
    """Equal seeds draw equal tokens, and another seed others."""

    def draw(seed: int) -> str:
        return (
            client.completions.create(
                model=MODEL, prompt="Once", max_tokens=12, temperature=1.5, seed=seed
            )
            .choices[0]
            .text
        )

    equal(draw(7), draw(7))
    assert len({draw(7), draw(8), draw(9)}) > 1


@check
def chat_logprobs() -> None:
    """Log probabilities of a chat stand beside their tokens and bytes."""
    got = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY)
    content = got.choices[0].logprobs.content
    equal(len(content), got.usage.completion_tokens)
    for entry in content:
        equal(len(entry.top_logprobs), 3)
        assert entry.logprob <= 0
        equal(bytes(entry.bytes).decode(), entry.token)
        equal(entry.top_logprobs[0].token, entry.token)  # greedy
    chunks = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    streamed = [
        e
        for c in chunks
        for choice in c.choices
        if choice.logprobs
        for e in choice.logprobs.content
    ]
    equal([e.token for e in streamed], [e.token for e in content])


@check
def scoring() -> None:
    """Echo with log probabilities scores a prompt."""
    got = client.completions.create(
        model=MODEL, prompt=PROMPTS[0], echo=True, logprobs=2, max_tokens=1, temperature=0
    )
    columns = got.choices[0].logprobs
    assert got.choices[0].text.startswith(PROMPTS[0])
    equal(len(columns.tokens), got.usage.total_tokens)
    equal(columns.token_logprobs[0], None)
    assert all(value < 0 for value in columns.token_logprobs[1:])
    equal("".join(columns.tokens), got.choices[0].text)
    equal(columns.text_offset[0], 0)


@check
def sampling() -> None:
    """Biases and penalties reach the sampler."""
    biased = client.completions.create(prompt="Hello", logit_bias={"504": 100}, **GREEDY)
    equal(len(set(biased.choices[0].text.split())), 1)
    calm = client.completions.create(
        prompt="a a a a a a a",
        frequency_penalty=2,
        presence_penalty=2,
        top_p=0.9,
        extra_body={
            "repetition_penalty": 1.5,
            "min_p": 0.1,
            "top_k": 20,
            "min_tokens": 2,
            "ignore_eos": True,
        },
        **GREEDY,
    )
    equal(calm.usage.completion_tokens, 8)


@check
def errors() -> None:
    """Errors are the SDK's own types and name the field."""

    def refused(**wrong: object) -> openai.BadRequestError:
        return raises(
            openai.BadRequestError,
            lambda: client.chat.completions.create(**{"messages": MESSAGES, **GREEDY, **wrong}),
        )

    for name, value in {
        "temperature": -1,
        "top_p": 2,
        "max_tokens": 0,
        "n": 129,
        "seed": 2**70,
        "presence_penalty": 9,
    }.items():
        equal(refused(**{name: value}).param, name)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    equal(refused(tools=[tool]).param, "tools")
    equal(refused(response_format={"type": "json_object"}).param, "response_format")
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
    assert "content" in refused(messages=[{"role": "user", "content": [image]}]).param
    raises(
        openai.NotFoundError,
        lambda: client.chat.completions.create(**{**GREEDY, "model": "another"}, messages=MESSAGES),
    )
    raises(openai.NotFoundError, lambda: client.embeddings.create(model=MODEL, input="x"))
    raises(openai.NotFoundError, lambda: client.responses.create(model=MODEL, input="x"))
    raises(
        openai.BadRequestError,
        lambda: client.completions.create(prompt="x", stream=True, **{**GREEDY, "max_tokens": -1}),
    )


@check
def keys() -> None:
    """A wrong key is an AuthenticationError, where there are keys."""
    wrong = OpenAI(base_url=V1, api_key="wrong", max_retries=0)
    if HAS_KEYS:
        raises(openai.AuthenticationError, wrong.models.list)
    else:
        equal(len(wrong.models.list().data), 1)


@check
def leaving() -> None:
    """A stream that is left early is cancelled."""
    with cancelled():
        stream = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=2000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for count, _ in enumerate(stream):
            if count == 3:
                break
        stream.close()


@check
def many() -> None:
    """The asynchronous client runs several streams at once."""

    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=V1, api_key=API_KEY, max_retries=0) as remote:

            async def one() -> str:
                stream = await remote.chat.completions.create(
                    messages=MESSAGES, stream=True, **GREEDY
                )
                return "".join(
                    [c.choices[0].delta.content or "" async for c in stream if c.choices]
                )

            return list(await asyncio.gather(*(one() for _ in range(6))))

    answers = asyncio.run(run())
    equal(len(answers), 6)
    assert all("Paris" in answer for answer in answers), answers


if __name__ == "__main__":
    sys.exit(main())
