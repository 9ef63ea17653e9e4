"""Operations on the model's thread: their place in a step, and in which result they are named."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gpu_worker.executor import Executor, StepOutcome
from gpu_worker.messages import FaultCode, FaultScope, StepResult
from gpu_worker.metrics import WorkerMetrics
from gpu_worker.ports import Operation, OperationKind, ScheduledRow, StepOutput
from servicekit.logs import get_logger
from tests.stub_worker.fake_runner import FakeOptions, FakeRunner, token_from_history
from tests.worker_builders import PlanScript, make_admit, make_operation

COPY, SWAP_OUT, SWAP_IN = OperationKind.COPY, OperationKind.SWAP_OUT, OperationKind.SWAP_IN
OPTIONS = FakeOptions(
    step_ms=0.0,
    vocab_size=100,
    num_blocks=64,
    num_host_blocks=16,
    block_size=4,
    max_model_len=40,
    max_num_seqs=8,
)
ROW: dict[str, Any] = {"admits": [make_admit()], "schedule": [(0, 5)]}


class NotedRunner(FakeRunner):
    """Notes the order of what it is asked, and can break while it copies."""

    def __init__(self, options: FakeOptions) -> None:
        super().__init__(options)
        self.calls: list[object] = []
        self.break_at: str = ""

    def run(self, rows: Sequence[ScheduledRow]) -> StepOutput:
        self.calls.append("run")
        return super().run(rows)

    def begin_operations(self, operations: Sequence[Operation]) -> None:
        if self.break_at == "begin":
            raise RuntimeError("no such memory")
        self.calls.append([operation.op_id for operation in operations])
        super().begin_operations(operations)

    def finished_operations(self, *, wait: bool) -> Sequence[int]:
        if self.break_at == "finished":
            raise RuntimeError("no such memory")
        self.calls.append("wait" if wait else "ask")
        return super().finished_operations(wait=wait)


class Bench:
    """An executor over a runner, and what it posts. Plans are queued before it starts."""

    def __init__(self, **options: Any) -> None:
        values = {name: getattr(OPTIONS, name) for name in OPTIONS.__slots__}
        self.runner = NotedRunner(FakeOptions(**{**values, **options}))
        self.outcomes: asyncio.Queue[StepOutcome] = asyncio.Queue()
        self.executor = Executor(
            load=lambda: self.runner,
            on_outcome=self.outcomes.put_nowait,
            on_death=pytest.fail,
            log=get_logger("test"),
        )
        self.script = PlanScript()

    def queue(self, **plan: Any) -> None:
        assert self.executor.submit(self.script.plan(**plan))

    async def ended(self, count: int) -> list[StepOutcome]:
        async with asyncio.timeout(20):
            return [await self.outcomes.get() for _ in range(count)]

    async def run(self, count: int) -> list[StepOutcome]:
        await self.executor.start()
        return await self.ended(count)


@pytest.fixture
async def make_bench() -> AsyncIterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**options: Any) -> Bench:
        benches.append(Bench(**options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.executor.stop()


def done(outcomes: Sequence[StepOutcome]) -> list[list[int]]:
    """Operations named by each result."""
    return [list(outcome.result.operations_done) for outcome in outcomes]


async def test_copies_made_at_once_come_before_the_rows_and_are_named_in_their_own_result(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    copies = [make_operation(3, COPY, [(9, 10)]), make_operation(7, SWAP_OUT, [(9, 0)])]
    bench.queue(**ROW, operations=copies)
    bench.queue(schedule=[(0, 1)])
    outcomes = await bench.run(2)
    assert done(outcomes) == [[3, 7], []]
    assert bench.runner.calls == [[3, 7], "run", "ask", "run"]
    assert [len(outcome.operations) for outcome in outcomes] == [2, 0]


async def test_a_plan_without_rows_waits_for_its_operations(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(swap_steps=5)
    bench.queue(operations=[make_operation(1, SWAP_OUT, [(9, 0)])])
    bench.queue(**ROW)
    first, _ = outcomes = await bench.run(2)
    assert done(outcomes) == [[1], []]
    result = first.result
    assert (list(result.slots), list(result.faults), first.num_tokens) == ([], [], 0)
    assert result.times.total_us >= result.times.apply_us
    assert (result.times.forward_us, result.times.sample_us) == (0, 0)


async def test_a_swap_that_goes_on_is_named_by_a_later_result(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(swap_steps=2)
    bench.queue(**ROW, operations=[make_operation(1, SWAP_OUT, [(9, 0)])])
    bench.queue(schedule=[(0, 1)], operations=[make_operation(2, SWAP_IN, [(0, 10)])])
    for _ in range(4):
        bench.queue()
    assert done(await bench.run(6)) == [[], [], [1], [2], [], []]


async def test_the_last_plan_there_is_waits_for_every_operation(
    make_bench: Callable[..., Bench],
) -> None:
    """A scheduler with nothing to plan has no other way to hear of them."""
    bench = make_bench(swap_steps=5)
    bench.queue(**ROW, operations=[make_operation(1, SWAP_OUT, [(9, 0)])])
    bench.queue(schedule=[(0, 1)])
    assert done(await bench.run(2)) == [[], [1]]


@pytest.mark.parametrize("swap_steps", [0, 5])
async def test_a_step_that_fails_names_the_operations_that_ran(
    make_bench: Callable[..., Bench], swap_steps: int
) -> None:
    bench = make_bench(fail_at_step="error@1", swap_steps=swap_steps)
    bench.queue(**ROW, operations=[make_operation(1, SWAP_OUT, [(9, 0)])])
    bench.queue(schedule=[(0, 1)], operations=[make_operation(2, COPY, [(9, 10)])])
    bench.queue(**ROW, reset=True, operations=[make_operation(3, COPY, [(9, 10)])])
    outcomes = await bench.run(3)
    assert done(outcomes) == [[1], [], [3]]
    codes = [[fault.code for fault in outcome.result.faults] for outcome in outcomes]
    assert codes == [[FaultCode.COMPUTE], [FaultCode.AWAITING_RESET], []]
    assert [len(outcome.operations) for outcome in outcomes] == [1, 0, 1]


async def test_a_refused_plan_copies_nothing(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    good, bad = make_operation(1, COPY, [(9, 10)]), make_operation(2, COPY, [(9, 64)])
    bench.queue(**ROW, operations=[good, bad])
    (outcome,) = await bench.run(1)
    (fault,) = outcome.result.faults
    assert (fault.code, fault.scope) == (FaultCode.INVALID_PLAN, FaultScope.STEP)
    assert done([outcome]) == [[]]
    assert bench.runner.calls == []


async def test_a_reset_waits_for_the_operations_before_it_and_names_them(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(swap_steps=5)
    bench.queue(**ROW, operations=[make_operation(1, SWAP_OUT, [(9, 0)])])
    bench.queue(reset=True, **ROW)
    outcomes = await bench.run(2)
    assert done(outcomes) == [[], [1]]
    assert bench.runner.calls == [[1], "run", "ask", "wait", "run"]


async def test_a_new_epoch_waits_for_the_operations_of_the_old_one_and_forgets_them(
    make_bench: Callable[..., Bench],
) -> None:
    """Their numbers mean nothing to the new leader: number 1 is another operation there."""
    bench = make_bench(swap_steps=5)
    bench.queue(**ROW, operations=[make_operation(1, SWAP_OUT, [(9, 0)])])
    bench.script = PlanScript(epoch=2)
    bench.queue(**ROW, operations=[make_operation(1, SWAP_IN, [(0, 9)])])
    bench.queue(schedule=[(0, 1)])
    outcomes = await bench.run(3)
    assert done(outcomes) == [[], [], [1]]
    assert bench.runner.calls == [[1], "run", "ask", "wait", [1], "run", "ask", "run", "wait"]


@pytest.mark.parametrize("break_at", ["begin", "finished"])
async def test_an_operation_that_raises_ends_the_worker(
    make_bench: Callable[..., Bench], break_at: str
) -> None:
    bench = make_bench()
    bench.runner.break_at = break_at
    bench.queue(**ROW, operations=[make_operation(1, COPY, [(9, 10)])])
    (outcome,) = await bench.run(1)
    assert outcome.worker_failed
    (fault,) = outcome.result.faults
    assert (fault.code, fault.scope) == (FaultCode.COMPUTE, FaultScope.WORKER)
    assert fault.message == "RuntimeError: no such memory"
    assert (done([outcome]), outcome.batches) == ([[]], ())


@pytest.mark.parametrize("swap_steps", [0, 1, 3])
async def test_a_row_goes_on_in_other_blocks_with_the_same_tokens(
    make_bench: Callable[..., Bench], swap_steps: int
) -> None:
    """Out, its blocks given to another row, and back into other blocks; tokens come from them."""
    bench = make_bench(swap_steps=swap_steps)
    bench.queue(**ROW)
    bench.queue(schedule=[(0, 1)])
    out = make_operation(1, SWAP_OUT, [(0, 5), (1, 4)])
    bench.queue(releases=[0], operations=[out])
    other = make_admit(1, token_ids=(21, 22, 23, 24, 25), block_ids=(0, 1))
    bench.queue(admits=[other], schedule=[(1, 5)])
    bench.queue(schedule=[(1, 1)], operations=[make_operation(2, SWAP_IN, [(5, 8), (4, 3)])])
    outcomes = await bench.run(5)
    assert [op_id for named in done(outcomes) for op_id in named] == [1, 2]
    known = [11, 12, 13, 14, 15]
    for outcome in outcomes[:2]:
        known += outcome.result.token_ids
    back = make_admit(
        generation=2,
        token_ids=tuple(known),
        block_ids=(8, 3),
        num_computed_tokens=6,
        emit_from=2,
    )
    bench.queue(admits=[back], schedule=[(0, 1), (1, 0)])
    (last,) = await bench.ended(1)
    assert list(last.result.token_ids) == [token_from_history(known, bench.runner.options)]


def test_blocks_are_counted_by_kind() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "tiny")

    def count(kind: str) -> float | None:
        labels = {"model_name": "tiny", "kind": kind}
        return registry.get_sample_value("quire:worker_operation_blocks_total", labels)

    assert count("copy") == 0
    operations = [
        make_operation(1, SWAP_OUT, [(9, 0), (8, 1)]),
        make_operation(2, SWAP_OUT, [(7, 2)]),
        make_operation(3, SWAP_IN, [(1, 10)]),
    ]
    result = StepResult(epoch=1, step=1, digest=0)
    metrics.step_ended(StepOutcome(result=result, operations=operations))
    assert (count("copy"), count("swap_out"), count("swap_in")) == (0, 3, 1)
