"""A whole worker in this process: real gRPC, a made-up model, scripted scheduler and gateways."""

import asyncio
import dataclasses
import threading
from typing import Any

import grpc
import pytest
from quire.v1 import common_pb2, worker_pb2, worker_pb2_grpc

from gpu_worker import app
from gpu_worker.executor import MAX_QUEUED_PLANS
from gpu_worker.ports import SamplingSpec
from tests.integration.worker.bench import OPTIONS, Bench, MakeBench
from tests.stub_worker.fake_runner import FakeRunner, token_from_history
from tests.worker_builders import (
    GATEWAY_A,
    GATEWAY_B,
    PlanScript,
    make_admit,
    request_id,
)
from tests.worker_clients import status_of

PROMPT = [11, 12, 13, 14, 15]


def predict(count: int, prompt: list[int] | None = None) -> list[int]:
    """What the fake makes of a prompt."""
    tokens = list(prompt or PROMPT)
    for _ in range(count):
        tokens.append(token_from_history(tokens, OPTIONS))
    return tokens[len(prompt or PROMPT) :]


async def test_two_gateways_get_the_tokens_of_their_requests(make_bench: MakeBench) -> None:
    bench = await make_bench()
    scheduler, script = bench.scheduler(), PlanScript()
    await scheduler.open()
    assert scheduler.hello.worker_id == "w"
    assert scheduler.hello.incarnation == bench.worker.incarnation
    a, b = await bench.subscribed(), await bench.subscribed(GATEWAY_B, "b")
    long_prompt = list(range(20, 31))
    admits = [
        make_admit(0, sampling=SamplingSpec(max_tokens=4)),
        make_admit(
            1,
            reply_to=GATEWAY_B,
            token_ids=tuple(long_prompt),
            prompt_len=11,
            block_ids=(9, 3, 7),
            sampling=SamplingSpec(max_tokens=2),
        ),
    ]
    await scheduler.send(script.plan(admits=admits, schedule=[(0, 5), (1, 7)]))
    await scheduler.send(script.plan(schedule=[(0, 1), (1, 4)]))
    await scheduler.send(script.plan(schedule=[(1, 1)], growth=[(1, 12)]))
    await scheduler.send(script.plan())
    results = await scheduler.results(4)
    assert [list(result.slots) for result in results] == [[0], [0, 1], [0, 1], [0]]
    assert [list(result.finished_slots) for result in results] == [[], [], [1], [0]]
    assert results[3].num_wasted_rows == 1
    assert results[3].digest == script.digest()
    await a.read(4)
    await b.read(2)
    assert a.outputs == {request_id(0): predict(4)}
    assert b.outputs == {request_id(1): predict(2, long_prompt)}
    assert a.finishes == {request_id(0): common_pb2.FINISH_REASON_LENGTH}


async def test_a_resync_gives_every_result_once(make_bench: MakeBench) -> None:
    bench = await make_bench(step_ms=3.0)
    scheduler, script = bench.scheduler(), PlanScript()
    gateway = await bench.subscribed()
    await scheduler.open()
    incarnation = scheduler.hello.incarnation
    sampling = SamplingSpec(max_tokens=35)
    plans = [
        script.plan(
            admits=[make_admit(block_ids=tuple(range(10)), sampling=sampling)], schedule=[(0, 5)]
        ),
        script.plan(schedule=[(0, 1)]),
        *(script.plan() for _ in range(28)),
    ]
    seen: list[worker_pb2.StepResult] = []
    sent = 0
    for count in (1, 5, 2, 9, 3, 4, 6):
        for _ in range(count):
            while sent < len(plans) and sent - len(seen) < 4:
                await scheduler.send(plans[sent])
                sent += 1
            seen.extend(await scheduler.results(1))
        scheduler.call.cancel()
        scheduler = bench.scheduler()
        await scheduler.open(last_result=seen[-1].step, incarnation=incarnation)
        assert scheduler.hello.first_result_step <= seen[-1].step + 1
        sent = scheduler.hello.last_applied_step
    assert [result.step for result in seen] == list(range(1, 31))
    assert [token for result in seen for token in result.token_ids] == predict(30)
    await gateway.read(30)
    assert gateway.outputs == {request_id(0): predict(30)}


async def test_an_older_epoch_is_refused_and_a_newer_one_takes_over(
    make_bench: MakeBench,
) -> None:
    bench = await make_bench()
    old, new, script = bench.scheduler(), bench.scheduler(), PlanScript(epoch=4)
    await old.open(epoch=4)
    await old.send(script.plan(admits=[make_admit(attempt=2)], schedule=[(0, 5)]))
    await old.results(1)
    await new.open(epoch=9)
    ((state,),) = [chunk.slots for chunk in new.snapshot]
    assert (state.request_id, state.attempt, state.num_output_tokens) == (request_id(0), 2, 1)
    assert await old.status() is grpc.StatusCode.ABORTED
    assert (new.hello.last_applied_step, new.hello.first_result_step) == (0, 1)
    late = bench.scheduler()
    await late.dial()
    await late.call.write(
        worker_pb2.SessionRequest(
            open=worker_pb2.Open(epoch=8, min_schema_revision=1, max_schema_revision=1)
        )
    )
    assert (await late.read()).refused.highest_epoch == 9
    assert await late.status() is grpc.StatusCode.OK
    fresh = PlanScript(epoch=9)
    await new.send(fresh.plan(admits=[make_admit()], schedule=[(0, 5)]))
    (result,) = await new.results(1)
    assert (result.epoch, list(result.token_ids)) == (9, predict(1))


async def test_after_a_digest_mismatch_only_a_reset_is_taken(make_bench: MakeBench) -> None:
    bench = await make_bench()
    scheduler, script = bench.scheduler(), PlanScript()
    await scheduler.open()
    await scheduler.send(script.plan(admits=[make_admit()], schedule=[(0, 5)]))
    await scheduler.send(dataclasses.replace(script.plan(schedule=[(0, 1)]), digest=1))
    await scheduler.send(script.plan())
    await scheduler.send(script.plan(reset=True, admits=[make_admit()], schedule=[(0, 5)]))
    results = await scheduler.results(4)
    codes = [[(f.scope, f.code) for f in result.faults] for result in results]
    step = worker_pb2.Fault.SCOPE_STEP
    assert codes == [
        [],
        [(step, worker_pb2.Fault.CODE_DIGEST_MISMATCH)],
        [(step, worker_pb2.Fault.CODE_AWAITING_RESET)],
        [],
    ]
    assert results[1].digest != 1
    assert list(results[3].token_ids) == predict(1)


async def test_a_bad_plan_does_not_end_the_worker(make_bench: MakeBench) -> None:
    bench = await make_bench()
    scheduler, script = bench.scheduler(), PlanScript()
    await scheduler.open()
    await scheduler.send(script.plan(admits=[make_admit(block_ids=(9999,))], schedule=[(0, 5)]))
    (result,) = await scheduler.results(1)
    assert result.faults[0].code == worker_pb2.Fault.CODE_INVALID_PLAN
    await scheduler.send(script.plan(reset=True, admits=[make_admit()], schedule=[(0, 5)]))
    assert list((await scheduler.results(1))[0].token_ids) == predict(1)


async def test_tokens_are_replayed_after_a_broken_stream(make_bench: MakeBench) -> None:
    bench = await make_bench()
    scheduler, script = bench.scheduler(), PlanScript()
    await scheduler.open()
    gateway = await bench.subscribed()
    await scheduler.send(script.plan(admits=[make_admit()], schedule=[(0, 5)]))
    await scheduler.send(script.plan(schedule=[(0, 1)]))
    await scheduler.results(2)
    await gateway.read(1)
    await gateway.acknowledge()
    gateway.call.cancel()
    while (await scheduler.next("subscriptions")).gateway_ids:
        pass
    await scheduler.send(script.plan())
    await scheduler.results(1)
    subscribed = await gateway.subscribe(bench.worker.incarnation)
    assert not subscribed.gap
    await gateway.read(2)
    assert gateway.outputs == {request_id(0): predict(3)}


async def test_logprobs_come_with_their_tokens(make_bench: MakeBench) -> None:
    """The prompt in two chunks; a second request without logprobs beside it."""
    bench = await make_bench()
    scheduler, script = bench.scheduler(), PlanScript()
    await scheduler.open()
    gateway = await bench.subscribed()
    spec = SamplingSpec(max_tokens=3, num_logprobs=2, prompt_logprobs=True)
    admits = [make_admit(0, sampling=spec), make_admit(1)]
    await scheduler.send(script.plan(admits=admits, schedule=[(0, 2), (1, 5)]))
    await scheduler.send(script.plan(schedule=[(0, 3), (1, 0)]))
    await scheduler.send(script.plan(schedule=[(0, 1)]))
    await scheduler.results(3)
    await gateway.read(3)
    first, second = gateway.logprobs[request_id(0)]
    assert request_id(1) not in gateway.logprobs
    outputs = predict(2)
    assert gateway.outputs[request_id(0)] == outputs
    tokens = [*PROMPT[1:], outputs[0]]
    assert (first.num_prompt_rows, second.num_prompt_rows) == (4, 0)
    assert list(first.top_token_ids) == [(t + k) % 100 for t in tokens for k in range(2)]
    assert list(first.logprobs) == [-0.5] * 5
    assert list(second.top_logprobs) == [-0.5, -1.5]


async def test_the_logprobs_of_a_long_prompt_pass_and_are_replayed(make_bench: MakeBench) -> None:
    """8,192 tokens with 20 likely ones each: 172,032 values in one batch."""
    length = 8192
    bench = await make_bench(
        num_blocks=2100, max_model_len=8200, max_num_batched_tokens=length, vocab_size=150_000
    )
    scheduler, script = bench.scheduler(), PlanScript()
    await scheduler.open()
    admit = make_admit(
        token_ids=tuple(140_000 + i % 5000 for i in range(length)),
        prompt_len=length,
        block_ids=tuple(range(2050)),
        sampling=SamplingSpec(max_tokens=2, num_logprobs=20, prompt_logprobs=True),
    )
    await scheduler.send(script.plan(admits=[admit], schedule=[(0, length)]))
    await scheduler.results(1)
    gateway = await bench.subscribed()
    await gateway.read(1)
    (entry,) = gateway.logprobs[request_id(0)]
    assert (entry.num_prompt_rows, len(entry.top_logprobs)) == (length - 1, 20 * length)
    gateway.call.cancel()
    again = await bench.subscribed()
    await again.read(1)
    assert again.logprobs == gateway.logprobs


async def test_a_gap_is_told_when_the_outbox_was_too_small(make_bench: MakeBench) -> None:
    bench = await make_bench({"QUIRE_OUTBOX_BATCHES": "16"})
    scheduler, script = bench.scheduler(), PlanScript()
    await scheduler.open()
    admit = make_admit(block_ids=tuple(range(10)), sampling=SamplingSpec(max_tokens=35))
    await scheduler.send(script.plan(admits=[admit], schedule=[(0, 5)]))
    for step in range(20):
        await scheduler.send(script.plan(schedule=[(0, 1)] if step == 0 else []))
        await scheduler.results(1)
    await scheduler.results(1)
    subscribed = await bench.gateway().subscribe(bench.worker.incarnation)
    assert subscribed.gap


async def test_a_gateways_cancel_ends_the_row_and_reaches_the_scheduler(
    make_bench: MakeBench,
) -> None:
    bench = await make_bench()
    scheduler, script = bench.scheduler(), PlanScript()
    await scheduler.open()
    gateway = await bench.subscribed()
    admits = [make_admit(0), make_admit(1)]
    await scheduler.send(script.plan(admits=admits, schedule=[(0, 5), (1, 5)]))
    await scheduler.results(1)
    await gateway.cancel(request_id(0))
    await gateway.cancel(request_id(50))
    told: list[bytes] = []
    while len(told) < 2:
        told.extend((await scheduler.next("cancels")).request_ids)
    assert told == [request_id(0), request_id(50)]
    await scheduler.send(script.plan(schedule=[(0, 1), (1, 1)]))
    (result,) = await scheduler.results(1)
    assert (list(result.slots), result.num_wasted_rows) == ([1], 1)
    await gateway.read(2)
    assert {r: len(tokens) for r, tokens in gateway.outputs.items()} == {
        request_id(0): 1,
        request_id(1): 2,
    }
    assert not gateway.finishes


async def test_cancels_wait_for_a_scheduler(make_bench: MakeBench) -> None:
    bench = await make_bench()
    gateway = await bench.subscribed()
    await gateway.cancel(request_id(5))
    await asyncio.sleep(0.1)
    scheduler = bench.scheduler()
    await scheduler.open()
    assert list((await scheduler.next("cancels")).request_ids) == [request_id(5)]


async def test_the_scheduler_is_told_who_subscribes(make_bench: MakeBench) -> None:
    bench = await make_bench()
    a = await bench.subscribed()
    scheduler = bench.scheduler()
    await scheduler.open()
    assert list(scheduler.snapshot[-1].gateway_ids) == ["a"]
    await bench.subscribed(GATEWAY_B, "b")
    assert list((await scheduler.next("subscriptions")).gateway_ids) == ["a", "b"]
    a.call.cancel()
    assert list((await scheduler.next("subscriptions")).gateway_ids) == ["b"]


async def test_heartbeats_come_while_a_step_runs(
    make_bench: MakeBench, gate: threading.Event
) -> None:
    bench = await make_bench()
    scheduler, script = bench.scheduler(), PlanScript()
    await scheduler.open()
    await scheduler.send(script.plan(admits=[make_admit()], schedule=[(0, 5)]))
    num_busy = 0
    while num_busy < 2:
        num_busy += (await scheduler.next("heartbeat")).busy
    gate.set()
    await scheduler.results(1)
    beat = await scheduler.next("heartbeat")
    assert (beat.last_step, beat.busy) == (1, False)


async def test_a_gateway_that_does_not_read_holds_up_nobody(make_bench: MakeBench) -> None:
    bench = await make_bench({"QUIRE_OUTBOX_BATCHES": "16"})
    scheduler, script = bench.scheduler(), PlanScript()
    await scheduler.open()
    await bench.subscribed(GATEWAY_A, "slow")
    quick = await bench.subscribed(GATEWAY_B, "quick")
    for turn in range(40):
        releases = [0, 1] if turn else []
        admits = [
            make_admit(0, generation=turn + 1, request_id=request_id(2 * turn)),
            make_admit(
                1, generation=turn + 1, request_id=request_id(2 * turn + 1), reply_to=GATEWAY_B
            ),
        ]
        plan = script.plan(releases=releases, admits=admits, schedule=[(0, 5), (1, 5)])
        await scheduler.send(plan)
        await scheduler.results(1)
        await quick.read(1)
        await quick.acknowledge()
    assert len(quick.outputs) == 40


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (worker_pb2.Subscribe(gateway_id="a", reply_to=b"short"), grpc.StatusCode.INVALID_ARGUMENT),
        (worker_pb2.Subscribe(gateway_id="", reply_to=GATEWAY_A), grpc.StatusCode.INVALID_ARGUMENT),
        (
            worker_pb2.Subscribe(gateway_id="€" * 43, reply_to=GATEWAY_A),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            worker_pb2.Subscribe(gateway_id="a", reply_to=GATEWAY_A, incarnation=1),
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
    ],
)
async def test_a_bad_subscription_ends_the_stream(
    make_bench: MakeBench, message: worker_pb2.Subscribe, expected: grpc.StatusCode
) -> None:
    bench = await make_bench()
    call: Any = worker_pb2_grpc.TokensServiceStub(bench.channel()).Tokens()
    await call.write(worker_pb2.TokensRequest(subscribe=message))
    assert await status_of(call) is expected


async def test_a_malformed_cancel_ends_the_stream(make_bench: MakeBench) -> None:
    bench = await make_bench()
    gateway = await bench.subscribed()
    await gateway.cancel(b"short")
    assert await status_of(gateway.call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_session_begins_with_open_and_opens_once(make_bench: MakeBench) -> None:
    bench = await make_bench()
    first, second = bench.scheduler(), bench.scheduler()
    await first.dial()
    await first.send(PlanScript().plan())
    assert await first.status() is grpc.StatusCode.FAILED_PRECONDITION
    await second.open()
    await second.call.write(worker_pb2.SessionRequest(open=worker_pb2.Open(epoch=1)))
    assert await second.status() is grpc.StatusCode.FAILED_PRECONDITION


async def test_too_many_plans_end_the_session_and_a_resync_goes_on(
    make_bench: MakeBench, gate: threading.Event
) -> None:
    bench = await make_bench()
    scheduler, script = bench.scheduler(), PlanScript()
    await scheduler.open()
    admit = make_admit(block_ids=tuple(range(10)), sampling=SamplingSpec(max_tokens=30))
    await scheduler.send(script.plan(admits=[admit], schedule=[(0, 5)]))
    # Begun, so that it waits no more and the last plan is the one too many: a message to a call
    # that has ended would replace its status by an error of the library.
    executor = bench.worker._executor
    while executor.idle or executor._has_plans():  # noqa: ASYNC110 (a thread begins it)
        await asyncio.sleep(0.01)
    await scheduler.send(script.plan(schedule=[(0, 1)]))
    for _ in range(MAX_QUEUED_PLANS):
        await scheduler.send(script.plan())
    assert await scheduler.status() is grpc.StatusCode.RESOURCE_EXHAUSTED
    gate.set()
    again = bench.scheduler()
    await again.open(incarnation=bench.worker.incarnation)
    assert again.hello.last_applied_step == 1 + MAX_QUEUED_PLANS
    assert [result.step for result in await again.results(2)] == [1, 2]


async def test_drain_waits_for_rows_and_for_the_gateways(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "FLUSH_S", 30.0)
    bench = await make_bench()
    scheduler, script = bench.scheduler(), PlanScript()
    await scheduler.open()
    gateway = await bench.subscribed()
    admit = make_admit(sampling=SamplingSpec(max_tokens=3))
    await scheduler.send(script.plan(admits=[admit], schedule=[(0, 5)]))
    await scheduler.results(1)
    bench.stop.set()
    await scheduler.next("draining")
    await asyncio.sleep(0.5)
    assert not bench.running.done()
    await scheduler.send(script.plan(schedule=[(0, 1)]))
    await scheduler.send(script.plan())
    results = await scheduler.results(2)
    assert list(results[1].finished_slots) == [0]
    await asyncio.sleep(0.5)
    assert not bench.running.done()
    await gateway.read(3)
    await gateway.acknowledge()
    assert await bench.exit_code() == 0
    # The gateway has all there was: nothing of its own is in doubt.
    assert await status_of(gateway.call) is grpc.StatusCode.OK


async def test_drain_does_not_wait_longer_than_drain_s(make_bench: MakeBench) -> None:
    bench = await make_bench({"QUIRE_DRAIN_S": "0.3"})
    scheduler, script = bench.scheduler(), PlanScript()
    await scheduler.open()
    await scheduler.send(script.plan(admits=[make_admit()], schedule=[(0, 5)]))
    await scheduler.results(1)
    gateway = await bench.subscribed()
    await gateway.read()
    await gateway.acknowledge()
    bench.stop.set()
    assert await bench.exit_code() == 0
    # A row has not ended, so a step may have been computed that nobody heard of.
    assert await status_of(gateway.call) is not grpc.StatusCode.OK


async def test_a_broken_device_is_told_and_ends_the_process(make_bench: MakeBench) -> None:
    bench = await make_bench(fail_at_step="broken@1")
    scheduler, script = bench.scheduler(), PlanScript()
    await scheduler.open()
    await scheduler.send(script.plan(admits=[make_admit()], schedule=[(0, 5)]))
    (result,) = await scheduler.results(1)
    assert result.faults[0].scope == worker_pb2.Fault.SCOPE_WORKER
    assert await bench.exit_code() == 1


async def test_a_model_that_does_not_load_ends_the_process(make_bench: MakeBench) -> None:
    bench = await make_bench(load_s=-1.0)
    assert await bench.exit_code() == 1


async def test_the_process_stops_while_the_model_loads() -> None:
    bench = Bench(OPTIONS, {})
    loading, loaded = threading.Event(), threading.Event()

    def load() -> FakeRunner:
        loading.set()
        loaded.wait(60)
        return FakeRunner(OPTIONS)

    bench.worker._executor._load = load
    bench.running = asyncio.ensure_future(bench.worker.run(bench.stop))
    assert await asyncio.to_thread(loading.wait, 20)
    bench.stop.set()
    assert await bench.exit_code() == 0
    loaded.set()
