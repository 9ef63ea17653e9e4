"""The model's thread: strict order, faults with their scope, cancels between steps."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gpu_worker.executor import MAX_QUEUED_PLANS, Executor, StepOutcome
from gpu_worker.messages import FaultCode, FaultScope, FinishReason
from gpu_worker.ports import ModelRunner, RunnerInfo, SamplingSpec, ScheduledRow, StepOutput
from servicekit.logs import get_logger
from tests.stub_worker.fake_runner import FakeOptions, FakeRunner, token_from_history
from tests.worker_builders import PlanScript, make_admit, request_id

OPTIONS = FakeOptions(
    step_ms=0.0, vocab_size=100, num_blocks=64, block_size=4, max_model_len=40, max_num_seqs=8
)


class GatedRunner(FakeRunner):
    """Waits in every step until the test lets it through."""

    def __init__(self, options: FakeOptions) -> None:
        super().__init__(options)
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.slots: list[list[int]] = []

    def run(self, rows: Sequence[ScheduledRow]) -> StepOutput:
        self.slots.append([row.slot for row in rows])
        self.entered.set()
        assert self.gate.wait(30)
        return super().run(rows)


class Bench:
    """An executor and what it posts."""

    def __init__(self, load: Callable[[], ModelRunner]) -> None:
        self.outcomes: asyncio.Queue[StepOutcome] = asyncio.Queue()
        self.death: asyncio.Queue[str] = asyncio.Queue()
        self.executor = Executor(
            load=load,
            on_outcome=self.outcomes.put_nowait,
            on_death=self.death.put_nowait,
            log=get_logger("test"),
        )
        self.script = PlanScript()

    def submit(self, **plan: Any) -> bool:
        return self.executor.submit(self.script.plan(**plan))

    async def outcome(self) -> StepOutcome:
        async with asyncio.timeout(20):
            return await self.outcomes.get()


@pytest.fixture
async def make_bench() -> AsyncIterator[Callable[..., Any]]:
    benches: list[Bench] = []

    async def make(load: Callable[[], ModelRunner] | None = None, **options: Any) -> Bench:
        chosen = FakeOptions(**{**{f: getattr(OPTIONS, f) for f in OPTIONS.__slots__}, **options})
        bench = Bench(load or (lambda: FakeRunner(chosen)))
        benches.append(bench)
        await bench.executor.start()
        return bench

    yield make
    for bench in benches:
        bench.executor.stop()


async def test_loading_gives_the_numbers_or_what_it_raised() -> None:
    bench = Bench(lambda: FakeRunner(OPTIONS))
    info = await bench.executor.start()
    assert isinstance(info, RunnerInfo)
    bench.executor.stop()

    def fail() -> ModelRunner:
        raise FileNotFoundError("no such model")

    with pytest.raises(FileNotFoundError, match="no such model"):
        await Bench(fail).executor.start()


async def test_plans_are_computed_in_order_with_tokens_from_the_tables(
    make_bench: Callable[..., Any],
) -> None:
    bench = await make_bench()
    tokens = [11, 12, 13, 14, 15]
    bench.submit(admits=[make_admit()], schedule=[(0, 5)])
    bench.submit(schedule=[(0, 1)])
    for _ in range(2):
        bench.submit()
    for step in range(1, 5):
        outcome = await bench.outcome()
        assert outcome.result.step == step
        expected = token_from_history(tokens, OPTIONS)
        assert list(outcome.result.token_ids) == [expected]
        assert outcome.result.digest == bench.script.digest()
        tokens.append(expected)
    assert (bench.executor.last_step, bench.executor.busy) == (4, False)


async def test_more_plans_than_may_wait_are_not_taken(make_bench: Callable[..., Any]) -> None:
    runner = GatedRunner(OPTIONS)
    bench = await make_bench(lambda: runner)
    bench.submit(admits=[make_admit()], schedule=[(0, 5)])
    await asyncio.to_thread(runner.entered.wait, 30)
    assert bench.executor.busy
    assert all(bench.submit() for _ in range(MAX_QUEUED_PLANS))
    assert not bench.submit()
    bench.executor.discard_plans()
    runner.gate.set()
    assert (await bench.outcome()).result.step == 1
    async with asyncio.timeout(20):
        while not bench.executor.idle:  # noqa: ASYNC110  # the thread goes on by itself
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert bench.outcomes.empty()


async def test_a_plan_of_several_steps_gives_a_result_for_each(
    make_bench: Callable[..., Any],
) -> None:
    """The same tokens as single plans: block 24 is there before the row needs it."""
    single, several = await make_bench(), await make_bench()
    for bench in (single, several):
        bench.submit(admits=[make_admit()], schedule=[(0, 5)])
        await bench.outcome()
    single.submit(schedule=[(0, 1)])
    for step in range(3, 8):
        single.submit(growth=[(0, 24)] if step == 5 else ())
    several.submit(schedule=[(0, 1)], growth=[(0, 24)], num_steps=6)
    for step in range(2, 8):
        results = [(await bench.outcome()).result for bench in (single, several)]
        assert [result.step for result in results] == [step, step]
        assert results[0].token_ids == results[1].token_ids
        assert not results[1].faults


async def test_more_steps_than_may_wait_are_not_taken(make_bench: Callable[..., Any]) -> None:
    bench = await make_bench()
    plan = bench.script.plan(num_steps=MAX_QUEUED_PLANS)
    assert not bench.executor.submit(replace(plan, num_steps=MAX_QUEUED_PLANS + 1))
    assert not bench.executor.submit(replace(plan, num_steps=2**32 - 1))
    assert bench.executor.submit(plan)


async def test_steps_after_a_failed_one_of_their_plan_are_void(
    make_bench: Callable[..., Any],
) -> None:
    bench = await make_bench(fail_at_step="error@3")
    bench.submit(admits=[make_admit()], schedule=[(0, 5)])
    bench.submit(schedule=[(0, 1)], num_steps=4)
    bench.submit(reset=True, admits=[make_admit()], schedule=[(0, 5)])
    codes = [[f.code for f in (await bench.outcome()).result.faults] for _ in range(6)]
    void = [FaultCode.AWAITING_RESET]
    assert codes == [[], [], [FaultCode.COMPUTE], void, void, []]


async def test_a_row_that_ends_within_a_plan_of_several_steps_is_skipped(
    make_bench: Callable[..., Any],
) -> None:
    bench = await make_bench()
    ends = make_admit(sampling=SamplingSpec(max_tokens=3))
    bench.submit(admits=[ends], schedule=[(0, 5)])
    bench.submit(schedule=[(0, 1)], num_steps=4)
    results = [(await bench.outcome()).result for _ in range(5)]
    assert [list(result.finished_slots) for result in results] == [[], [], [0], [], []]
    assert [result.num_wasted_rows for result in results] == [0, 0, 0, 1, 1]


async def test_a_cancel_ends_a_row_between_the_steps_of_a_plan(
    make_bench: Callable[..., Any],
) -> None:
    runner = GatedRunner(OPTIONS)
    bench = await make_bench(lambda: runner)
    bench.submit(admits=[make_admit()], schedule=[(0, 5)], num_steps=1)
    bench.submit(schedule=[(0, 1)], num_steps=4)
    await asyncio.to_thread(runner.entered.wait, 30)
    bench.executor.cancel(make_admit().request_id)
    runner.gate.set()
    results = [(await bench.outcome()).result for _ in range(5)]
    assert [result.num_wasted_rows for result in results] == [0, 1, 1, 1, 1]
    assert [list(result.finished_slots) for result in results] == [[], [0], [0], [0], [0]]


async def test_a_cancel_while_a_step_runs_takes_effect_before_the_next(
    make_bench: Callable[..., Any],
) -> None:
    runner = GatedRunner(OPTIONS)
    bench = await make_bench(lambda: runner)
    bench.submit(admits=[make_admit(0), make_admit(1)], schedule=[(0, 5), (1, 5)])
    bench.submit(schedule=[(0, 1), (1, 1)])
    await asyncio.to_thread(runner.entered.wait, 30)
    assert bench.executor.cancel(request_id(0))
    runner.gate.set()
    assert list((await bench.outcome()).result.slots) == [0, 1]
    second = (await bench.outcome()).result
    assert (list(second.slots), second.num_wasted_rows) == ([1], 1)
    assert list(second.finished_slots) == [0]
    finishes = bench.executor.snapshot().recent_finishes
    assert [finish.finish_reason for finish in finishes] == [FinishReason.CANCELLED]


async def test_a_cancel_leaves_no_row_to_any_step_but_the_running_one(
    make_bench: Callable[..., Any],
) -> None:
    """However many plans wait, and also where a waiting one is yet to admit the request."""
    runner = GatedRunner(OPTIONS)
    bench = await make_bench(lambda: runner)
    longer = make_admit(
        1, block_ids=tuple(range(20, 24)), sampling=SamplingSpec(max_tokens=2 + MAX_QUEUED_PLANS)
    )
    bench.submit(admits=[make_admit(0), longer], schedule=[(0, 5), (1, 5)])
    await asyncio.to_thread(runner.entered.wait, 30)
    bench.submit(schedule=[(0, 1), (1, 1)])
    bench.submit(admits=[make_admit(2)], schedule=[(2, 5)])
    while bench.submit():
        pass
    assert all(bench.executor.cancel(request_id(number)) for number in (0, 2))
    runner.gate.set()
    ended = [await bench.outcome() for _ in range(1 + MAX_QUEUED_PLANS)]
    assert runner.slots == [[0, 1], *[[1]] * MAX_QUEUED_PLANS]
    assert not any(outcome.result.faults for outcome in ended)
    assert [set(outcome.result.slots) for outcome in ended[1:]] == [{1}] * MAX_QUEUED_PLANS
    finishes = bench.executor.snapshot().recent_finishes
    assert {f.request_id: f.finish_reason for f in finishes} == dict.fromkeys(
        (request_id(0), request_id(2)), FinishReason.CANCELLED
    )


async def test_a_cancel_takes_effect_without_a_plan(make_bench: Callable[..., Any]) -> None:
    bench = await make_bench()
    bench.submit(admits=[make_admit()], schedule=[(0, 5)])
    await bench.outcome()
    assert bench.executor.num_live_rows == 1
    bench.executor.cancel(request_id(0))
    for _ in range(2000):
        if bench.executor.num_live_rows == 0:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the row is still alive")


async def test_a_snapshot_does_not_wait_for_a_step(make_bench: Callable[..., Any]) -> None:
    runner = GatedRunner(OPTIONS)
    bench = await make_bench(lambda: runner)
    bench.submit(admits=[make_admit()], schedule=[(0, 5)])
    await asyncio.to_thread(runner.entered.wait, 30)
    (state,) = bench.executor.snapshot().slots
    assert (state.num_computed_tokens, state.num_output_tokens) == (0, 0)
    runner.gate.set()
    await bench.outcome()


@pytest.mark.parametrize(
    ("kind", "code"), [("oom", FaultCode.OUT_OF_MEMORY), ("error", FaultCode.COMPUTE)]
)
async def test_a_step_that_raises_fails_alone_and_a_reset_recovers(
    make_bench: Callable[..., Any], kind: str, code: FaultCode
) -> None:
    bench = await make_bench(fail_at_step=f"{kind}@2")
    bench.submit(admits=[make_admit()], schedule=[(0, 5)])
    bench.submit(schedule=[(0, 1)])
    bench.submit()
    bench.submit(reset=True, admits=[make_admit()], schedule=[(0, 5)])
    first, failed, awaiting, recovered = [await bench.outcome() for _ in range(4)]
    assert not first.result.faults
    (fault,) = failed.result.faults
    assert (fault.scope, fault.code, fault.retryable) == (FaultScope.STEP, code, True)
    assert (list(failed.result.slots), failed.batches) == ([], ())
    assert awaiting.result.faults[0].code is FaultCode.AWAITING_RESET
    assert not recovered.result.faults
    assert recovered.result.token_ids == first.result.token_ids


async def test_a_row_that_fails_ends_alone(make_bench: Callable[..., Any]) -> None:
    bench = await make_bench(fail_at_step="row@1")
    bench.submit(admits=[make_admit(0), make_admit(1)], schedule=[(0, 5), (1, 5)])
    result = (await bench.outcome()).result
    assert (list(result.slots), list(result.finished_slots)) == ([0], [1])
    (fault,) = result.faults
    assert (fault.scope, fault.slot) == (FaultScope.REQUEST, 1)
    bench.submit(schedule=[(0, 1), (1, 0)])
    assert not (await bench.outcome()).result.faults


@pytest.mark.parametrize("kind", ["broken", "exit"])
async def test_a_broken_device_ends_the_thread_with_a_worker_fault(
    make_bench: Callable[..., Any], kind: str
) -> None:
    bench = await make_bench(fail_at_step=f"{kind}@1")
    bench.submit(admits=[make_admit()], schedule=[(0, 5)])
    bench.submit()
    outcome = await bench.outcome()
    assert outcome.worker_failed
    assert outcome.result.faults[0].scope is FaultScope.WORKER
    await asyncio.sleep(0.05)
    assert bench.outcomes.empty()


async def test_a_refused_plan_runs_nothing(make_bench: Callable[..., Any]) -> None:
    runner = FakeRunner(OPTIONS)
    bench = await make_bench(lambda: runner)
    bench.submit(reset=False)
    (fault,) = (await bench.outcome()).result.faults
    assert (fault.scope, fault.code) == (FaultScope.STEP, FaultCode.AWAITING_RESET)
    bench.submit(reset=True, releases=[3])
    (fault,) = (await bench.outcome()).result.faults
    assert fault.code is FaultCode.INVALID_PLAN
    assert runner.num_runs == 0


async def test_a_plan_without_rows_has_a_result_and_runs_nothing(
    make_bench: Callable[..., Any],
) -> None:
    runner = FakeRunner(OPTIONS)
    bench = await make_bench(lambda: runner)
    bench.submit()
    outcome = await bench.outcome()
    assert (list(outcome.result.slots), outcome.num_tokens, runner.num_runs) == ([], 0, 0)


async def test_the_times_of_a_step_add_up(make_bench: Callable[..., Any]) -> None:
    bench = await make_bench(step_ms=500.0)
    bench.submit(admits=[make_admit()], schedule=[(0, 5)])
    bench.submit(schedule=[(0, 1)])
    outcomes = [await bench.outcome() for _ in range(2)]
    first, second = [outcome.result.times for outcome in outcomes]
    assert first.forward_us >= 500_000
    assert second.total_us >= first.forward_us + second.forward_us
    assert second.idle_us < 500_000
    parts_us = second.idle_us + second.apply_us + second.forward_us + second.sample_us
    assert outcomes[1].cycle_us >= parts_us > 0
