"""What a client sees when a process of the stack dies, restarts or drains: its whole answer.

Torch-free workers whose tokens follow from all tokens before them, so that a lost, doubled or
misplaced token changes everything after it.
"""

import asyncio
import signal

import grpc.aio
import pytest
from quire.v1 import common_pb2, inference_pb2_grpc

from benchmarks.client import Answer
from benchmarks.soak import generate, generate_request
from benchmarks.stack import Process, Stack, fetch
from benchmarks.workload import Job, Shape, jobs
from servicekit import grpc_server
from tests.e2e.conftest import STUB_DRAIN_S
from tests.e2e.models import VOCAB_SIZE
from tests.e2e.stack import (
    Streams,
    assert_equal_streams,
    assert_exact,
    assert_idle,
    await_workers,
    bodies,
    mend,
    redis_state,
    seed_of,
    slowed,
    start_streams,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def work_for(seed: str, count: int, output: tuple[int, int] = (64, 192)) -> list[Job]:
    """Jobs whose prompts lie in the stub's vocabulary."""
    return [
        Job(prompt=tuple(3 + t % (VOCAB_SIZE - 3) for t in job.prompt), num_output=job.num_output)
        for job in jobs(seed, count, Shape(prompt=(8, 64), output=output))
    ]


async def undisturbed(stack: Stack, work: list[Job], num_sampled: int = 0) -> list[Answer]:
    """The answers when nothing happens."""
    answers = await start_streams(
        stack.client, bodies(stack.model_name, work, num_sampled)
    ).finish()
    assert_exact(work, answers)
    return answers


def busiest(workers: list[Process]) -> tuple[Process, int]:
    """The worker with the most live rows, and how many they are."""
    rows = [(int(worker.metrics().total("quire:slots_used")), worker) for worker in workers]
    most, worker = max(rows, key=lambda pair: pair[0])
    return worker, most


def recovered(stack: Stack) -> float:
    """Requests that the scheduler has moved from lost workers."""
    return stack.scheduler.metrics().total("quire:requests_recovered_total")


async def test_streams_survive_the_kill_of_their_worker(stub_stack: Stack) -> None:
    work = work_for("kill", 16)
    expected = await undisturbed(stub_stack, work, num_sampled=4)
    before = recovered(stub_stack)
    with slowed(stub_stack):
        streams = start_streams(stub_stack.client, bodies(stub_stack.model_name, work, 4))
        await streams.reach(5)
        victim, num_held = busiest(stub_stack.workers)
        assert num_held >= 6
        victim.kill()
    answers = await streams.finish()
    assert_exact(work, answers)
    assert_equal_streams(answers, expected)
    assert recovered(stub_stack) - before >= 6
    await asyncio.to_thread(await_workers, stub_stack, 1)
    mend(stub_stack)
    await asyncio.to_thread(assert_idle, stub_stack)


async def test_grpc_streams_survive_the_kill_of_both_workers_in_turn(stub_stack: Stack) -> None:
    # Slowed, they outlast the restart of a worker on a slow machine.
    work = work_for("both", 12, output=(700, 700))
    expected = await undisturbed(stub_stack, work)
    async with grpc_server.channel(stub_stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with slowed(stub_stack):
            calls = [
                asyncio.ensure_future(generate(stub, generate_request(job, seed_of(i))))
                for i, job in enumerate(work)
            ]
            for worker in stub_stack.workers:
                await until(lambda: busiest(stub_stack.workers)[1] >= 3)
                worker.kill()
                worker.start()
                await asyncio.to_thread(worker.wait_event, "ready")
                await asyncio.to_thread(await_workers, stub_stack, 2)
        results = await asyncio.gather(*calls)
    for (tokens, ends), answer in zip(results, expected, strict=True):
        assert tokens == list(answer.token_ids)
        assert [end.finish_reason for end in ends] == [common_pb2.FINISH_REASON_LENGTH]
    await asyncio.to_thread(assert_idle, stub_stack)


async def grow(streams: Streams, num_events: int) -> None:
    """Waits until each stream that has not ended has so many events more than now."""
    start = streams.progress

    def grown() -> bool:
        return all(
            exchange.progress >= before + num_events or exchange.ended.done()
            for exchange, before in zip(streams.watch, start, strict=True)
        )

    await until(grown)


async def test_running_streams_do_not_notice_that_redis_is_away(stub_stack: Stack) -> None:
    work = work_for("redis", 8, output=(300, 350))
    expected = await undisturbed(stub_stack, work)
    with slowed(stub_stack, more_s=0.05):
        streams = start_streams(stub_stack.client, bodies(stub_stack.model_name, work))
        await streams.reach(5)
        stub_stack.redis.kill()
        # The first who finds out may be a request; it must not hang.
        refused = await stub_stack.client.complete(bodies(stub_stack.model_name, work[:1])[0])
        assert refused.status == 503
        await grow(streams, 50)
        assert fetch(f"{stub_stack.base_url}/ready")[0] == 503
        assert not any(exchange.ended.done() for exchange in streams.watch)
    stub_stack.start_redis()
    await asyncio.to_thread(stub_stack.wait_ready)
    late = work_for("late", 2)
    assert_exact(late, await undisturbed(stub_stack, late))
    answers = await streams.finish()
    assert_exact(work, answers)
    assert_equal_streams(answers, expected)
    await asyncio.to_thread(assert_idle, stub_stack)


async def test_streams_that_end_while_redis_is_away_are_finished_later(stub_stack: Stack) -> None:
    work = work_for("ends", 8, output=(64, 96))
    with slowed(stub_stack):
        streams = start_streams(stub_stack.client, bodies(stub_stack.model_name, work))
        await streams.reach(5)
        stub_stack.redis.kill()
    assert_exact(work, await streams.finish())
    stub_stack.start_redis()
    await asyncio.to_thread(stub_stack.wait_ready)
    await asyncio.to_thread(assert_idle, stub_stack)


async def test_a_draining_gateway_ends_every_stream_explicitly(stub_stack: Stack) -> None:
    short, long = work_for("short", 4, output=(64, 64)), work_for("long", 2, output=(3900, 3900))
    streams = start_streams(stub_stack.client, bodies(stub_stack.model_name, [*short, *long]))
    await streams.reach(3)
    stub_stack.gateway.signal(signal.SIGTERM)
    await asyncio.to_thread(stub_stack.gateway.wait_event, "draining")
    refused = await stub_stack.client.complete(bodies(stub_stack.model_name, short[:1])[0])
    assert refused.status == 503 or refused.broken
    answers = await streams.finish()
    assert_exact(short, answers[:4])
    for answer in answers[4:]:
        assert answer.status == 200
        assert not answer.broken
        assert (answer.num_terminal, len(answer.errors), answer.done) == (1, 1, 1)
    assert await asyncio.to_thread(stub_stack.gateway.wait, STUB_DRAIN_S + 30) == 0
    mend(stub_stack)
    await asyncio.to_thread(assert_idle, stub_stack)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_new_scheduler_takes_up_what_is_pending(
    stub_stack: Stack, how: signal.Signals
) -> None:
    # More requests than slots: some run, some wait, all are in Redis alone when it starts.
    work = work_for("scheduler", 80, output=(48, 96))
    expected = await undisturbed(stub_stack, work)
    with slowed(stub_stack):
        streams = start_streams(stub_stack.client, bodies(stub_stack.model_name, work))
        await until(lambda: sum(count > 5 for count in streams.progress) >= 32)
        assert redis_state(stub_stack.redis_port, stub_stack.model_name)["stream"] >= 40
        stub_stack.scheduler.signal(how)
        await asyncio.to_thread(stub_stack.scheduler.wait)
    stub_stack.scheduler.start()
    await asyncio.to_thread(stub_stack.scheduler.wait_event, "ready")
    answers = await streams.finish()
    assert_exact(work, answers)
    assert_equal_streams(answers, expected)
    await asyncio.to_thread(assert_idle, stub_stack)


async def test_a_client_that_leaves_frees_its_blocks(stub_stack: Stack) -> None:
    work = work_for("leave", 6, output=(3900, 3900))
    streams = start_streams(stub_stack.client, bodies(stub_stack.model_name, work))
    async with grpc_server.channel(stub_stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = asyncio.ensure_future(generate(stub, generate_request(work[0])))
        await streams.reach(10)
        assert stub_stack.scheduler.metrics().total("quire:blocks_used") > 0
        for task in [*streams.tasks, call]:
            task.cancel()
        gone = await asyncio.gather(*streams.tasks, call, return_exceptions=True)
    assert all(isinstance(e, asyncio.CancelledError | grpc.aio.AioRpcError) for e in gone)
    await asyncio.to_thread(assert_idle, stub_stack)
