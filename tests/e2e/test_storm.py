"""Two thousand random requests, a third of them given up: one terminal event each, no leftovers."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.client import CHAT, COMPLETIONS, Answer, Exchange
from benchmarks.stack import Metrics, Stack
from tests.e2e.models import VOCAB_SIZE
from tests.e2e.stack import assert_idle, assert_tasks, num_tasks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NUM_REQUESTS, CANCEL_SHARE, NUM_CLIENTS = 2_000, 0.3, 64
ENDS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One request, and when its client goes away: after `leave_s`, or after `leave_events`."""

    path: str
    body: dict[str, Any]
    leave_s: float | None = None
    leave_events: int | None = None

    @property
    def leaves(self) -> bool:
        """The client does not wait for the end."""
        return self.leave_s is not None or self.leave_events is not None


def random_plan(chance: random.Random) -> Plan:
    """Both interfaces, streamed or not, greedy or sampled, of all lengths up to a few blocks."""
    body: dict[str, Any] = {
        "max_tokens": chance.randint(1, 40),
        "temperature": chance.choice([0, 0.7, 1.3]),
        "seed": chance.randrange(2**31),
        "ignore_eos": chance.random() < 0.5,
    }
    if chance.random() < 0.5:
        path = CHAT
        content = "".join(chance.choices("abcdefgh ", k=chance.randint(1, 60)))
        body["messages"] = [{"role": "user", "content": content}]
    else:
        path = COMPLETIONS
        length = chance.randint(1, 80)
        body["prompt"] = [chance.randrange(3, VOCAB_SIZE) for _ in range(length)]
    if chance.random() < 0.2:
        body["stop"] = [f" w{chance.randrange(300, VOCAB_SIZE)}"]
    if streamed := chance.random() < 0.6:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if chance.random() >= CANCEL_SHARE:
        return Plan(path=path, body=body)
    if streamed and chance.random() < 0.5:
        return Plan(path=path, body=body, leave_events=chance.randint(1, 20))
    return Plan(path=path, body=body, leave_s=chance.uniform(0.0, 0.4))


async def carry_out(stack: Stack, plan: Plan) -> Answer | None:
    """The answer; None where the client went away before the end."""
    body = {**plan.body, "model": stack.model_name}
    if plan.leave_events is None:
        try:
            async with asyncio.timeout(plan.leave_s):
                return await stack.client.call(plan.path, body)
        except TimeoutError:
            return None
    watch: list[Exchange] = []
    call = asyncio.ensure_future(stack.client.call(plan.path, body, watch=watch))
    while not call.done():
        if watch and watch[0].progress >= plan.leave_events:
            call.cancel()
        await asyncio.wait({call}, timeout=0.005)
    return None if call.cancelled() else call.result()


def gateway_ends(metrics: Metrics) -> Counter[str]:
    """Terminal events that the gateway has counted, by reason."""
    counted: Counter[str] = Counter()
    for reason in ENDS:
        name = "vllm:request_success_total"
        counted[reason] = int(metrics.total(name, finished_reason=reason))
    return counted


def wrong(plan: Plan, answer: Answer) -> str:
    """What is wrong with the answer of a client that has stayed; empty if nothing is."""
    expected_done = 1 if plan.body.get("stream") else 0
    if answer.broken or answer.status != 200:
        return f"{answer.broken} status {answer.status} {answer.errors}"
    if answer.num_terminal != 1 or answer.errors or answer.done != expected_done:
        return f"ends {answer.finish_reasons}, errors {answer.errors}, {answer.done} [DONE]"
    asked = plan.body["max_tokens"]
    exact = answer.finish_reasons == ("length",)
    if answer.num_tokens > asked or (exact and answer.num_tokens != asked):
        return f"{answer.num_tokens} tokens, asked for {asked}, {answer.finish_reasons}"
    return ""


async def clients(stack: Stack, plans: list[Plan]) -> AsyncIterator[tuple[Plan, Answer | None]]:
    """NUM_CLIENTS at a time; in the order of their ends."""
    todo = iter(plans)
    done: asyncio.Queue[tuple[Plan, Answer | None]] = asyncio.Queue()

    async def one_client() -> None:
        for plan in todo:
            done.put_nowait((plan, await carry_out(stack, plan)))

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            group.create_task(one_client())
        for _ in plans:
            yield await done.get()


async def test_every_request_of_a_storm_has_one_end_and_nothing_is_left(
    stub_stack: Stack,
) -> None:
    chance = random.Random(20)
    plans = [random_plan(chance) for _ in range(NUM_REQUESTS)]
    tasks = num_tasks(stub_stack)
    ends_before = gateway_ends(stub_stack.gateway.metrics())
    problems: list[str] = []
    given_up = stayed = 0
    async for plan, answer in clients(stub_stack, plans):
        if answer is None:
            given_up += 1
            continue
        stayed += 1
        if problem := wrong(plan, answer):
            problems.append(f"{plan.path} {plan.body}: {problem}")
    assert problems == []
    assert given_up + stayed == NUM_REQUESTS
    # Some who meant to leave had their answer first.
    assert given_up > CANCEL_SHARE * NUM_REQUESTS / 2
    await asyncio.to_thread(assert_idle, stub_stack)
    await asyncio.to_thread(assert_tasks, stub_stack, tasks)
    ends = gateway_ends(stub_stack.gateway.metrics()) - ends_before
    assert ends["error"] == 0
    assert ends["stop"] + ends["length"] >= stayed
    # A client that left before its request was accepted has no end to count.
    assert ends["abort"] > 0
    assert stayed < ends.total() <= NUM_REQUESTS
