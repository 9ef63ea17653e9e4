"""langchain-openai: its chat and text models."""

import asyncio
import sys

import openai
from checks import (
    API_KEY,
    HAS_KEYS,
    MODEL,
    PROMPTS,
    QUESTION,
    V1,
    cancelled,
    check,
    equal,
    main,
    raises,
)
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

SERVER = {"base_url": V1, "api_key": API_KEY, "model": MODEL, "max_retries": 0}


def chat_model(**more: object) -> ChatOpenAI:
    """A greedy one unless told otherwise."""
    return ChatOpenAI(**{**SERVER, "temperature": 0, "max_tokens": 8, **more})


@check
def invoke() -> None:
    """A chat has an answer, a reason and a usage."""
    got = chat_model().invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert isinstance(got, AIMessage)
    assert got.content
    equal(got.response_metadata["model_name"], MODEL)
    usage = got.usage_metadata
    equal(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"])


@check
def stream() -> None:
    """A streamed chat is the whole one in pieces, with the usage."""
    model = chat_model(stream_usage=True)
    chunks = list(model.stream(QUESTION))
    whole = model.invoke(QUESTION)
    equal("".join(chunk.content for chunk in chunks), whole.content)
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    equal(total.usage_metadata["output_tokens"], whole.usage_metadata["output_tokens"])


@check
def chains() -> None:
    """A chain of prompt, model and parser runs, and a batch of it."""
    prompt = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")])
    chain = prompt | chat_model() | StrOutputParser()
    answers = chain.batch([{"country": "France"}] * 3)
    assert all("Paris" in answer for answer in answers), answers


@check
def text_model() -> None:
    """The text model answers several prompts, and streams one."""
    model = OpenAI(**SERVER, temperature=0, max_tokens=8)
    got = model.generate(PROMPTS)
    equal(len(got.generations), len(PROMPTS))
    assert got.llm_output["token_usage"]["total_tokens"] > 0
    equal("".join(model.stream(PROMPTS[0])), got.generations[0][0].text)


@check
def parameters() -> None:
    """Stop, seed and log probabilities are passed on."""
    whole = chat_model().invoke(QUESTION).content
    equal(chat_model().invoke(QUESTION, stop=[whole[2:4]]).content, whole[:2])
    hot = chat_model(temperature=1.5, seed=7)
    equal(hot.invoke(QUESTION).content, hot.invoke(QUESTION).content)
    scored = chat_model(logprobs=True, top_logprobs=2).invoke(QUESTION)
    entries = scored.response_metadata["logprobs"]["content"]
    equal(len(entries), scored.usage_metadata["output_tokens"])


@check
def errors() -> None:
    """Errors are those of the openai package below it."""
    raises(openai.BadRequestError, lambda: chat_model(temperature=-1).invoke(QUESTION))
    raises(openai.BadRequestError, lambda: chat_model(n=129).invoke(QUESTION))
    raises(openai.NotFoundError, lambda: chat_model(model="another").invoke(QUESTION))
    if HAS_KEYS:
        stranger = chat_model(api_key="wrong")
        raises(openai.AuthenticationError, lambda: stranger.invoke(QUESTION))


@check
def leaving() -> None:
    """An asynchronous stream that is left early is cancelled."""

    async def run() -> None:
        model = chat_model(max_tokens=2000, extra_body={"ignore_eos": True})
        stream = model.astream(QUESTION)
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
