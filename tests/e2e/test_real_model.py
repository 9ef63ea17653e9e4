"""What `make serve` starts, with two workers and the real model in bf16, as its clients see it.

The arithmetic is that of QUIRE_DETERMINISTIC=1: tokens must not depend on what a request is batched
with or on which worker computes it. Without native kernels there is no such mode; then float32
serves, and what needs the mode is skipped. The tests share one stack; the last one that needs two
workers alive waits until they are.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from quire.v1 import common_pb2, inference_pb2, inference_pb2_grpc

from benchmarks.client import CHAT, COMPLETIONS, Answer
from benchmarks.soak import generate, soak
from benchmarks.stack import wait_for
from benchmarks.workload import Job, Shape, jobs
from servicekit import grpc_server
from tests.e2e.stack import (
    LauncherStack,
    assert_equal_streams,
    assert_exact,
    bodies,
    start_streams,
    until,
)
from tests.kernels.native import REASON, needs_native
from tests.model_cache import real_model_dir

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

WORKERS = ("worker-0", "worker-1")
QUESTION = "What is the capital of France?"
ARITHMETIC = (
    {"QUIRE_DTYPE": "bfloat16", "QUIRE_DETERMINISTIC": "1"}
    if REASON is None
    else {"QUIRE_DTYPE": "float32"}
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LauncherStack]:
    """The launcher's own stack; it must end by itself and leave no process."""
    settings = {"WORKERS": "2", "MODEL": str(real_model_dir()), **ARITHMETIC}
    launched = LauncherStack(
        tmp_path_factory.mktemp("real"), {**settings, "QUIRE_SERVED_MODEL_NAME": "smollm2-135m"}
    )
    try:
        launched.start()
        yield launched
        launched.stop()
    finally:
        launched.destroy()


def rows(stack: LauncherStack, worker: str) -> int:
    """Live rows of a worker."""
    return int(stack.metrics(worker).total("quire:slots_used"))


def await_both_workers(stack: LauncherStack) -> None:
    """Waits until the scheduler has a session with both."""
    wait_for(
        lambda: stack.metrics("scheduler_svc").total("quire:workers") == len(WORKERS),
        lambda: f"both workers\n{stack.text()[-2000:]}",
        180.0,
    )


async def complete(stack: LauncherStack, **body: Any) -> Answer:
    """One completion that must go well, not streamed, with token ids."""
    request = {"model": stack.model_name, "temperature": 0, "return_token_ids": True, **body}
    answer = await stack.client.call(COMPLETIONS, request)
    assert (answer.status, answer.errors, answer.num_terminal) == (200, (), 1)
    return answer


async def test_the_openai_client_streams_the_capital_of_france(stack: LauncherStack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.base_url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=stack.model_name,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=96,
            stream=True,
            stream_options={"include_usage": True},
            # A gateway that was held up sends several tokens in one chunk, but not so many.
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "Paris" in "".join(choice.delta.content or "" for choice in choices)
    assert sum(bool(choice.delta.content) for choice in choices) > 3
    assert [c.finish_reason for c in choices if c.finish_reason] == ["length"]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 96
    assert usage.prompt_tokens > len(QUESTION.split())


async def test_rest_and_grpc_give_the_same_tokens(stack: LauncherStack) -> None:
    prompt = "The three primary colors are"
    rest = await complete(stack, prompt=prompt, max_tokens=32, ignore_eos=True)
    streamed = await stack.client.complete(
        {
            "model": stack.model_name,
            "prompt": prompt,
            "max_tokens": 32,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
    )
    request = inference_pb2.GenerateRequest(
        text=prompt, max_tokens=32, temperature=0.0, ignore_eos=True
    )
    async with grpc_server.channel(stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        tokens, ends = await generate(stub, request)
    assert len(rest.token_ids) == 32
    assert tuple(tokens) == rest.token_ids == streamed.token_ids
    assert streamed.text == rest.text
    assert [end.finish_reason for end in ends] == [common_pb2.FINISH_REASON_LENGTH]
    assert ends[0].usage.completion_tokens == 32


async def test_a_stop_string_ends_the_output_before_it(stack: LauncherStack) -> None:
    free = await complete(stack, prompt="One, two, three, four,", max_tokens=24, ignore_eos=True)
    # A string from the middle of the free output, across tokens.
    stop = free.text[8:14]
    end = free.text.index(stop)
    stopped = await complete(
        stack, prompt="One, two, three, four,", max_tokens=24, ignore_eos=True, stop=[stop]
    )
    assert stopped.text == free.text[:end]
    assert stopped.finish_reasons == ("stop",)
    assert stopped.num_tokens < free.num_tokens


async def test_a_seed_fixes_sampled_tokens(stack: LauncherStack) -> None:
    def ask(seed: int) -> Any:
        body = {"prompt": "My favourite animal", "max_tokens": 24, "temperature": 1.0}
        return complete(stack, **body, seed=seed, ignore_eos=True)

    first, again, other = await asyncio.gather(ask(5), ask(5), ask(6))
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


async def test_a_chat_that_is_not_streamed_ends_by_itself(stack: LauncherStack) -> None:
    body = {
        "model": stack.model_name,
        "messages": [{"role": "user", "content": "Say only the word yes."}],
        "temperature": 0,
        "max_tokens": 64,
    }
    answer = await stack.client.call(CHAT, body)
    assert answer.status == 200
    assert answer.finish_reasons == ("stop",)
    assert answer.num_tokens < 64
    assert answer.text.strip()


async def test_many_clients_stream_without_an_error(stack: LauncherStack) -> None:
    """The short form of `python -m benchmarks.soak --clients 64 --seconds 120`."""
    tally = await soak(
        stack.client,
        stack.grpc_address,
        stack.model_name,
        num_clients=16,
        seconds=20,
        shape=Shape(prompt=(8, 32), output=(16, 48)),
    )
    assert tally.problems == []
    assert tally.num_streams >= 16


@needs_native
async def test_the_kill_of_a_worker_fails_no_request_and_changes_no_token(
    stack: LauncherStack,
) -> None:
    await asyncio.to_thread(await_both_workers, stack)
    # Long enough that none has ended when its worker is killed.
    work: list[Job] = jobs("kill", 16, Shape(prompt=(8, 32), output=(96, 160)))
    requests = bodies(stack.model_name, work, num_sampled=8)
    expected = await start_streams(stack.client, requests).finish()
    assert_exact(work, expected)
    before = stack.metrics("scheduler_svc").total("quire:requests_recovered_total")
    streams = start_streams(stack.client, requests)
    await streams.reach(4, timeout_s=300)
    await until(lambda: max(rows(stack, worker) for worker in WORKERS) >= 6)
    victim = max(WORKERS, key=lambda worker: rows(stack, worker))
    assert rows(stack, victim) >= 6
    os.kill(stack.pid(victim), signal.SIGKILL)
    answers = await streams.finish()
    assert_exact(work, answers)
    assert_equal_streams(answers, expected)
    recovered = stack.metrics("scheduler_svc").total("quire:requests_recovered_total") - before
    assert recovered >= 6
    await asyncio.to_thread(stack.wait_text, f"^{victim} has died", 60.0)
    await asyncio.to_thread(stack.wait_text, f"^restarted: {victim}", 180.0)
    await asyncio.to_thread(await_both_workers, stack)
