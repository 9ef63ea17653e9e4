"""The model's thread: takes plans in order, computes them, posts outcomes to the event loop.

Owns the replica and the runner. The loop talks to the thread through a bounded list of plans and a
bounded set of cancels, both under one lock; the thread answers with `call_soon_threadsafe`. The
replica has a lock of its own, which is never held while the model computes, so that a snapshot
does not wait for a step.

Operations that may still run beside the next step are not waited for: a later result names them.
A step waits for all of them if it has no rows, if it failed, or if no other plan is there yet, so
that a scheduler with nothing to plan gets every acknowledgement. A plan with `reset` waits for
those before it, and forgets them if its epoch is a new one. Both count as the step's apply time.
An operation that raises ends the worker, since its blocks hold nobody knows what.

Bounds: MAX_QUEUED_PLANS plans wait (more is the sender's fault, `submit` says False);
MAX_PENDING_CANCELS cancels wait (more are dropped: their senders repeat them while tokens come).
"""

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from structlog.typing import FilteringBoundLogger

from gpu_worker.messages import (
    Fault,
    FaultCode,
    FaultScope,
    Snapshot,
    StepPlan,
    StepResult,
    StepTimes,
    TokenBatch,
)
from gpu_worker.ports import (
    BrokenDeviceError,
    ModelRunner,
    Operation,
    OutOfDeviceMemoryError,
    RunnerInfo,
    ScheduledRow,
    StepOutput,
)
from gpu_worker.replica import AppliedPlan, CompletedStep, Refusal, Replica
from gpu_worker.slot_table import ReplicaLimits

MAX_QUEUED_PLANS = 8
MAX_PENDING_CANCELS = 100_000
_MAX_FAULT_CHARS = 500
_NO_OUTPUT = StepOutput(token_ids=())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """A step that has been taken from the queue: its result and the tokens for each gateway."""

    result: StepResult
    batches: Sequence[tuple[bytes, TokenBatch]] = ()
    num_tokens: int = 0
    operations: Sequence[Operation] = ()  # that were begun
    cycle_us: int = 0  # from the end of the step before to the end of this one, on the thread

    @property
    def worker_failed(self) -> bool:
        """The thread has ended with this step."""
        return any(fault.scope is FaultScope.WORKER for fault in self.result.faults)


@dataclass(slots=True)
class _Step:
    """What a step has come to; when it fails, what is there is reported."""

    output: StepOutput = _NO_OUTPUT
    apply_ns: int = 0
    digest: int = 0
    num_tokens: int = 0
    num_wasted_rows: int = 0
    operations: Sequence[Operation] = ()
    operations_done: list[int] = field(default_factory=list)
    done: CompletedStep | None = None


class _StepFailedError(Exception):
    """A step that was not computed, with its fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class Executor:
    """Start it once; every method but the thread's own is for the event loop's thread."""

    def __init__(
        self,
        *,
        load: Callable[[], ModelRunner],
        on_outcome: Callable[[StepOutcome], None],
        on_death: Callable[[str], None],
        log: FilteringBoundLogger,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._load = load
        self._on_outcome = on_outcome
        self._on_death = on_death
        self._log = log
        self._clock_ns = clock_ns
        self._work = threading.Condition()
        self._plans: deque[tuple[StepPlan, int]] = deque()
        self._cancels: set[bytes] = set()
        self._stopping = False
        self._replica: Replica | None = None
        self._replica_lock = threading.Lock()
        # In a copy of the context, so that logs of the thread carry what is bound at start.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._main,), name="model", daemon=True
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[RunnerInfo] | None = None
        self._idle_since_ns = 0
        self._last_step = 0
        self._busy = False
        self._num_live_rows = 0

    @property
    def last_step(self) -> int:
        """Last step taken from the queue and ended."""
        return self._last_step

    @property
    def busy(self) -> bool:
        """A step is being computed."""
        return self._busy

    @property
    def idle(self) -> bool:
        """Nothing is computed and nothing waits."""
        with self._work:
            return not (self._busy or self._plans or self._cancels)

    @property
    def num_live_rows(self) -> int:
        """Rows that have not ended, as of the last step or cancel."""
        return self._num_live_rows

    async def start(self) -> RunnerInfo:
        """Loads the model on the thread. Raises what loading raised."""
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._thread.start()
        return await self._loaded

    def submit(self, plan: StepPlan) -> bool:
        """Queues a plan, each of its steps singly; False, and nothing queued, at the bound."""
        with self._work:
            if len(self._plans) + max(1, plan.num_steps) > MAX_QUEUED_PLANS:
                return False
            now_ns = self._clock_ns()
            self._plans.extend((step, now_ns) for step in plan.single_steps())
            self._work.notify()
        return True

    def discard_plans(self) -> None:
        """Drops plans that have not begun; the leader that sent them has been replaced."""
        with self._work:
            self._plans.clear()

    def cancel(self, request_id: bytes) -> bool:
        """Ends the request's row before the next step, if there is one; False at the bound."""
        with self._work:
            if len(self._cancels) >= MAX_PENDING_CANCELS:
                return False
            self._cancels.add(request_id)
            self._work.notify()
        return True

    def snapshot(self) -> Snapshot:
        """The table now; while a step runs, as it was before it."""
        assert self._replica is not None, "there is no table before the model is loaded"
        with self._replica_lock:
            return self._replica.snapshot()

    def stop(self) -> None:
        """The thread ends after the step it is in. Does not wait."""
        with self._work:
            self._stopping = True
            self._work.notify()

    def _main(self) -> None:
        try:
            runner = self._load()
            self._replica = Replica(limits_of(runner.info))
        except BaseException as error:
            self._post(self._loading_ended, None, error)
            return
        self._post(self._loading_ended, runner.info, None)
        self._idle_since_ns = self._clock_ns()
        try:
            while self._turn(runner, self._replica):
                pass
        except BaseException as error:
            self._log.error("model thread died", exc_info=True)
            self._post(self._on_death, f"the model thread died: {type(error).__name__}")

    def _loading_ended(self, info: RunnerInfo | None, error: BaseException | None) -> None:
        assert self._loaded is not None
        if self._loaded.cancelled():
            return
        if info is not None:
            self._loaded.set_result(info)
        elif error is not None:
            self._loaded.set_exception(
                error if isinstance(error, Exception) else RuntimeError(repr(error))
            )

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop has closed: the process is leaving and nobody waits for the outcome.
            self._stopping = True

    def _turn(self, runner: ModelRunner, replica: Replica) -> bool:
        """Cancels, then at most one plan. False at the end."""
        with self._work:
            while not (self._plans or self._cancels or self._stopping):
                self._work.wait()
            if self._stopping:
                return False
            cancels, self._cancels = self._cancels, set()
            plan, received_ns = self._plans.popleft() if self._plans else (None, 0)
            self._busy = plan is not None
        if cancels:
            with self._replica_lock:
                replica.cancel(cancels)
            self._num_live_rows = replica.num_live_rows
        if plan is None:
            return True
        outcome = self._step(runner, replica, plan, received_ns)
        self._num_live_rows = replica.num_live_rows
        self._last_step = plan.step
        self._busy = False
        before_ns, self._idle_since_ns = self._idle_since_ns, self._clock_ns()
        outcome = replace(outcome, cycle_us=(self._idle_since_ns - before_ns) // 1000)
        self._post(self._on_outcome, outcome)
        return not outcome.worker_failed

    def _step(
        self, runner: ModelRunner, replica: Replica, plan: StepPlan, received_ns: int
    ) -> StepOutcome:
        begin_ns = self._clock_ns()
        step = _Step()
        try:
            self._compute(runner, replica, plan, step)
            faults = step.done.faults if step.done else ()
            if faults:
                rows = [(fault.slot, fault.message) for fault in faults]
                self._log.warning("rows failed", step=plan.step, epoch=plan.epoch, rows=rows)
        except _StepFailedError as error:
            fault = self._after_failure(runner, replica, step, error.fault)
            faults = (fault,)
            self._log.warning(
                "step failed", step=plan.step, epoch=plan.epoch, code=fault.code.name,
                reason=fault.message,
            )  # fmt: skip
        done, output = step.done, step.output
        times = StepTimes(
            idle_us=max(0, begin_ns - self._idle_since_ns) // 1000,
            apply_us=step.apply_ns // 1000 + output.apply_us,
            forward_us=output.forward_us,
            sample_us=output.sample_us,
            total_us=max(0, self._clock_ns() - received_ns) // 1000,
        )
        result = StepResult(
            epoch=plan.epoch,
            step=plan.step,
            digest=step.digest,
            slots=done.slots if done else (),
            token_ids=done.token_ids if done else (),
            finished_slots=done.finished_slots if done else (),
            finish_reasons=done.finish_reasons if done else (),
            num_wasted_rows=step.num_wasted_rows if done else 0,
            faults=faults,
            times=times,
            operations_done=step.operations_done,
        )
        return StepOutcome(
            result=result,
            batches=done.batches if done else (),
            num_tokens=step.num_tokens if done else 0,
            operations=step.operations,
        )

    def _compute(self, runner: ModelRunner, replica: Replica, plan: StepPlan, step: _Step) -> None:
        """Fills `step` as far as it gets. Raises _StepFailedError."""
        begin_ns = self._clock_ns()
        if plan.reset:
            old_epoch = plan.epoch != replica.epoch
            done = self._finished_operations(runner, replica, wait=True)
            step.operations_done.extend(() if old_epoch else done)
        applied = self._apply(replica, plan)
        step.apply_ns = self._clock_ns() - begin_ns
        step.digest = applied.digest
        if isinstance(applied, Refusal):
            raise _StepFailedError(
                Fault(
                    scope=FaultScope.STEP,
                    code=applied.code,
                    message=applied.message[:_MAX_FAULT_CHARS],
                    retryable=True,
                )
            )
        step.num_tokens, step.num_wasted_rows = applied.num_tokens, applied.num_wasted_rows
        if applied.operations:
            self._begin_operations(runner, applied.operations)
            step.operations = applied.operations
            step.apply_ns = self._clock_ns() - begin_ns
        if applied.rows:
            step.output = self._run(runner, applied.rows)
        if replica.num_operations:
            begin_ns = self._clock_ns()
            wait = not applied.rows or not self._has_plans()
            done = self._finished_operations(runner, replica, wait=wait)
            step.operations_done.extend(done)
            if not applied.rows:
                # Beside rows it is no part of what the step costs, by which the next are timed.
                step.apply_ns += self._clock_ns() - begin_ns
        step.done = self._complete(replica, step.output)

    def _after_failure(
        self, runner: ModelRunner, replica: Replica, step: _Step, fault: Fault
    ) -> Fault:
        """Names all operations that had begun, if the device is fine; the fault to report."""
        with self._replica_lock:
            replica.fail_step()
        if fault.scope is FaultScope.STEP:
            try:
                step.operations_done.extend(self._finished_operations(runner, replica, wait=True))
            except _StepFailedError as worse:
                return worse.fault
        return fault

    def _has_plans(self) -> bool:
        with self._work:
            return bool(self._plans)

    def _begin_operations(self, runner: ModelRunner, operations: Sequence[Operation]) -> None:
        try:
            runner.begin_operations(operations)
        except BaseException as error:
            raise self._lost_blocks(error) from error

    def _finished_operations(
        self, runner: ModelRunner, replica: Replica, *, wait: bool
    ) -> Sequence[int]:
        if not replica.num_operations:
            return ()
        try:
            op_ids = runner.finished_operations(wait=wait)
            replica.operations_done(op_ids)
        except BaseException as error:
            raise self._lost_blocks(error) from error
        return op_ids

    def _lost_blocks(self, error: BaseException) -> _StepFailedError:
        """After this nobody knows what is in the blocks: the worker leaves."""
        self._log.error("copying blocks raised", exc_info=True)
        return _StepFailedError(_step_fault(FaultCode.COMPUTE, error, FaultScope.WORKER))

    def _apply(self, replica: Replica, plan: StepPlan) -> AppliedPlan | Refusal:
        try:
            with self._replica_lock:
                return replica.apply(plan)
        except Exception as error:
            # A plan that finds a bug of ours must not end the process: a reset rebuilds the table.
            self._log.error("applying a plan raised", step=plan.step, exc_info=True)
            raise _StepFailedError(_step_fault(FaultCode.INVALID_PLAN, error)) from error

    def _run(self, runner: ModelRunner, rows: Sequence[ScheduledRow]) -> StepOutput:
        try:
            return runner.run(rows)
        except OutOfDeviceMemoryError as error:
            raise _StepFailedError(_step_fault(FaultCode.OUT_OF_MEMORY, error)) from error
        except Exception as error:
            broken = isinstance(error, BrokenDeviceError)
            self._log.error("computing a step raised", broken=broken, exc_info=True)
            fault = _step_fault(
                FaultCode.COMPUTE, error, FaultScope.WORKER if broken else FaultScope.STEP
            )
            raise _StepFailedError(fault) from error
        except BaseException as error:
            fault = _step_fault(FaultCode.COMPUTE, error, FaultScope.WORKER)
            raise _StepFailedError(fault) from error

    def _complete(self, replica: Replica, output: StepOutput) -> CompletedStep:
        try:
            with self._replica_lock:
                return replica.complete(output)
        except Exception as error:
            self._log.error("booking a step raised", exc_info=True)
            raise _StepFailedError(_step_fault(FaultCode.COMPUTE, error)) from error


def _step_fault(
    code: FaultCode, error: BaseException, scope: FaultScope = FaultScope.STEP
) -> Fault:
    message = f"{type(error).__name__}: {error}"[:_MAX_FAULT_CHARS]
    return Fault(scope=scope, code=code, message=message, retryable=scope is FaultScope.STEP)


def limits_of(info: RunnerInfo) -> ReplicaLimits:
    """What a plan may name, by what the model offers."""
    return ReplicaLimits(
        num_slots=info.max_num_seqs,
        num_blocks=info.cache_group.num_blocks,
        block_size=info.cache_group.block_size,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        max_num_batched_tokens=info.max_num_batched_tokens,
        num_host_blocks=info.cache_group.num_host_blocks,
    )
