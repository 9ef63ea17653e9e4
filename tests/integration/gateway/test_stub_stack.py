"""The gateway before a real scheduler and a worker without a model: scoring, and clients that go.

The worker's steps are slow and small, so that what is computed tells how many there were.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.stack import Stack
from tests.e2e.models import write_stub_model
from tests.e2e.stack import assert_idle, await_workers

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
STEP_S = 0.2
STEP_TOKENS = 128
PROMPT = [300, 301, 302, 303]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One worker."""
    folder = tmp_path_factory.mktemp("stub")
    settings = {
        "QUIRE_DRAIN_S": "1",
        "QUIRE_MAX_INFLIGHT_STEPS": "4",
        "QUIRE_MAX_NUM_BATCHED_TOKENS": str(STEP_TOKENS),
        "STUB_STEP_MS": str(int(STEP_S * 1000)),
    }
    with Stack(
        folder / "stack",
        model=str(write_stub_model(Path(folder) / "stub-model")),
        worker_module="tests.stub_worker",
        settings=settings,
    ) as running:
        await_workers(running, 1)
        yield running


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """Of the REST interface; the stack is idle before and after."""
    assert_idle(stack)
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=60) as found:
        yield found
    await asyncio.to_thread(assert_idle, stack)


async def computed(stack: Stack) -> float:
    """Tokens that the worker has computed."""
    metrics = await asyncio.to_thread(stack.workers[0].metrics)
    return metrics.total("vllm:iteration_tokens_total_sum")


async def post(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """A completion."""
    response = await client.post("/v1/completions", json={"prompt": PROMPT} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def steps_until_gone(stack: Stack, begin_s: float) -> int:
    """How many steps may have been computed since begin_s when the gateway has lost its clients.

    The one that runs, one that may begin while the cancel is on its way, and as many more as the
    client was late to leave, or the gateway to see it.
    """
    while (await asyncio.to_thread(stack.gateway.metrics)).total("quire:gateway_streams"):  # noqa: ASYNC110
        await asyncio.sleep(STEP_S / 20)
    return 2 + round((time.monotonic() - begin_s) / STEP_S)


@pytest.mark.parametrize("num_prompts", [1, 2])
async def test_a_client_that_leaves_costs_at_most_two_steps(
    stack: Stack, client: httpx.AsyncClient, num_prompts: int
) -> None:
    """The one that runs, and one that may begin while the cancel is on its way."""
    body = {"prompt": [PROMPT] * num_prompts, "max_tokens": 500, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
        lines = answer.aiter_lines()
        for _ in range(6):
            await anext(lines)
        begin_s, before = time.monotonic(), await computed(stack)
    num_steps = await steps_until_gone(stack, begin_s)
    await asyncio.to_thread(assert_idle, stack)
    assert await computed(stack) - before <= num_steps * num_prompts


async def test_a_client_that_leaves_before_its_prompt_is_computed(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    """No token has said which worker has it: all of them are told."""
    begin = await computed(stack)
    prompt = [300 + i % 50 for i in range(20 * STEP_TOKENS)]
    loop = asyncio.get_running_loop()
    body = {"prompt": prompt, "cache_salt": "leaves"}
    asking = loop.create_task(client.post("/v1/completions", json=body))
    begin_s, before = time.monotonic(), begin
    while before == begin:
        await asyncio.sleep(STEP_S / 10)
        begin_s, before = time.monotonic(), await computed(stack)
    asking.cancel()
    await asyncio.wait([asking])
    num_steps = await steps_until_gone(stack, begin_s)
    await asyncio.to_thread(assert_idle, stack)
    assert await computed(stack) - before <= num_steps * STEP_TOKENS


async def in_cache(stack: Stack) -> None:
    """Waits for the scheduler: a client has the tokens before it has the steps' results."""
    await asyncio.to_thread(assert_idle, stack)


async def test_scoring(client: httpx.AsyncClient) -> None:
    """As lm-eval asks for it: a batch of token ids, one token more, everything back."""
    prompts = [PROMPT, [304, 305], [*PROMPT, 306]]
    answer = await post(
        client, prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234
    )
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == [None, *[-0.5] * len(prompt)]
        assert len(logprobs["top_logprobs"]) == len(logprobs["tokens"]) == len(prompt) + 1
        greedy = [
            value == max(top.values())
            for value, top in zip(
                logprobs["token_logprobs"][1:-1], logprobs["top_logprobs"][1:-1], strict=True
            )
        ]
        assert all(greedy)
    assert answer["usage"]["completion_tokens"] == len(prompts)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_scoring_the_same_prompt_again_takes_nothing_from_the_cache(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    """Logprobs of positions that were not computed would be missing."""
    prompt = [300 + i % 50 for i in range(200)]
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    await post(client, **fields)
    await in_cache(stack)
    hit = await post(client, **fields)
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    scored = await post(client, **fields, echo=True, logprobs=0)
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == [None, *[-0.5] * 200]


async def test_a_prompt_alone(client: httpx.AsyncClient) -> None:
    """No output, and its logprobs all the same."""
    answer = await post(client, max_tokens=0, logprobs=2, echo=True)
    [choice] = answer["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT)
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


async def test_logprobs_survive_in_a_stream(client: httpx.AsyncClient) -> None:
    """One for each token, whole or streamed."""
    body: dict[str, Any] = {"max_tokens": 6, "logprobs": 1, "seed": 5, "ignore_eos": True}
    whole = (await post(client, **body))["choices"][0]
    response = await client.post("/v1/completions", json={"prompt": PROMPT, "stream": True} | body)
    frames = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
    shown = [f["choices"][0]["logprobs"] for f in frames if f["choices"][0]["logprobs"]]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for part in shown for x in part[name]] == whole["logprobs"][name]
    assert len(whole["logprobs"]["tokens"]) == 6


async def test_a_clients_deadline(client: httpx.AsyncClient) -> None:
    """504 before the first token, an event behind it."""
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body | {"deadline_ms": 900})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    # Long enough for a first token, however late.
    streamed = body | {"deadline_ms": 4000, "stream": True}
    response = await client.post("/v1/completions", json=streamed)
    assert response.status_code == 200
    assert response.text.count('"code":"deadline_exceeded"') == 1
    assert response.text.endswith("data: [DONE]\n\n")


async def test_salts_keep_prefixes_apart(stack: Stack, client: httpx.AsyncClient) -> None:
    """A hit under one salt is none under another."""
    prompt = [310 + i % 40 for i in range(100)]
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 1}
    await post(client, **fields, cache_salt="a")
    await in_cache(stack)
    again = await post(client, **fields, cache_salt="a")
    other = await post(client, **fields, cache_salt="b")
    cached = [x["usage"]["prompt_tokens_details"]["cached_tokens"] for x in (again, other)]
    assert cached[0] > 0
    assert cached[1] == 0


async def test_samples_hold_the_blocks_of_their_prompt_once(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    """Six whole blocks of 16 in common, and two more for each of the four."""
    before = await asyncio.to_thread(stack.scheduler.metrics)
    most = 0.0
    async with openai.AsyncOpenAI(base_url=f"{stack.base_url}/v1", api_key="none") as sdk:
        stream = await sdk.completions.create(
            model=stack.model_name,
            prompt=[300 + i % 50 for i in range(100)],
            n=4,
            max_tokens=20,
            temperature=1.0,
            seed=5,
            stream=True,
            stream_options={"include_usage": True},
            # Its own part of the cache: what other tests left there would not be forked.
            extra_body={"ignore_eos": True, "cache_salt": "samples"},
        )
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            metrics = await asyncio.to_thread(stack.scheduler.metrics)
            most = max(most, metrics.total("quire:blocks_used"))
    after = await asyncio.to_thread(stack.scheduler.metrics)
    texts = ["".join(c.text for k in chunks for c in k.choices if c.index == i) for i in range(4)]
    assert len(set(texts)) == 4
    assert 0 < most <= 6 + 4 * 2
    for name in ("quire:forks_total", "quire:copied_blocks_total"):
        assert after.total(name) - before.total(name) == 3
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (100, 80)
