"""The worker's copy of the slot table, built from plans and from the tokens it samples itself.

Pure; one owner at a time. `apply` checks a whole plan before it changes anything: a plan that
breaks the protocol is refused as a value and leaves the table as it was. After any refusal every
plan is refused until one with `reset`, because plans are differences and the later ones stand on
the refused one.

Invariants: a row's digest is the sum over its block table, the replica's the sum of its rows'; a
scheduled slot is a slot of the table; a row to compute has tokens and blocks for what is planned,
and no two of them write to one block.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gpu_worker import digest
from gpu_worker.messages import (
    Fault,
    FaultCode,
    FaultScope,
    FinishedRequest,
    FinishReason,
    SlotState,
    Snapshot,
    StepPlan,
    TokenBatch,
)
from gpu_worker.ports import ScheduledRow, StepOutput
from gpu_worker.slot_table import (
    InvalidPlanError,
    PendingRow,
    ReplicaLimits,
    Row,
    TableState,
    stage,
    stage_rows,
)

MAX_RECENT_FINISHES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The plan is not computed. `digest` is the worker's, after the plan where it got so far."""

    code: FaultCode
    message: str
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedPlan:
    """The step to compute; may have no rows."""

    rows: Sequence[ScheduledRow]
    num_tokens: int
    num_wasted_rows: int
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedStep:
    """What the step gave: result columns, and one batch per gateway under its reply_to."""

    slots: Sequence[int]
    token_ids: Sequence[int]
    finished_slots: Sequence[int]
    finish_reasons: Sequence[FinishReason]
    faults: Sequence[Fault]
    batches: Sequence[tuple[bytes, TokenBatch]]


class RunnerOutputError(Exception):
    """The runner's output does not fit the step."""


class _BatchBuilder:
    """Columns of one gateway's batch."""

    def __init__(self) -> None:
        self.request_ids: list[bytes] = []
        self.attempts: list[int] = []
        self.first_positions: list[int] = []
        self.num_tokens: list[int] = []
        self.token_ids: list[int] = []
        self.finish_reasons: list[int] = []
        self.num_cached_tokens: list[int] = []

    def build(self, step: int) -> TokenBatch:
        return TokenBatch(
            step=step,
            request_ids=self.request_ids,
            attempts=self.attempts,
            first_positions=self.first_positions,
            num_tokens=self.num_tokens,
            token_ids=self.token_ids,
            finish_reasons=self.finish_reasons,
            num_cached_tokens=self.num_cached_tokens,
        )


class Replica:
    """The slot table. Not thread-safe."""

    def __init__(self, limits: ReplicaLimits) -> None:
        self._limits = limits
        self._state = TableState()
        self._epoch = 0
        self._step = 0
        self._awaiting_reset = True
        self._pending: list[PendingRow] = []
        self._recent: deque[FinishedRequest] = deque(maxlen=MAX_RECENT_FINISHES)

    @property
    def digest(self) -> int:
        """Sum over all tables."""
        return self._state.digest

    @property
    def awaiting_reset(self) -> bool:
        """Only a plan with `reset` would be taken."""
        return self._awaiting_reset

    @property
    def num_live_rows(self) -> int:
        """Rows that have not ended."""
        return sum(row.ended is None for row in self._state.table.values())

    def apply(self, plan: StepPlan) -> AppliedPlan | Refusal:
        """Changes the table to what the plan says, or nothing at all."""
        if not plan.reset and (self._awaiting_reset or plan.epoch != self._epoch):
            message = "only a plan with reset is taken now"
            return self._refuse(FaultCode.AWAITING_RESET, message, self.digest)
        try:
            after = stage(self._state, plan, self._limits)
            if after.digest != plan.digest:
                # Before the rows are checked: tables that differ explain what is wrong with rows.
                message = f"digest is {after.digest:016x}, the plan has {plan.digest:016x}"
                return self._refuse(FaultCode.DIGEST_MISMATCH, message, after.digest)
            pending, rows, num_wasted = stage_rows(after, self._limits)
        except InvalidPlanError as error:
            return self._refuse(FaultCode.INVALID_PLAN, str(error), self.digest)
        after.commit_growth()
        self._state = after
        self._pending = pending
        self._epoch, self._step, self._awaiting_reset = plan.epoch, plan.step, False
        return AppliedPlan(
            rows=rows,
            num_tokens=sum(entry.num_tokens for entry in pending),
            num_wasted_rows=num_wasted,
            digest=self.digest,
        )

    def _refuse(self, code: FaultCode, message: str, own_digest: int) -> Refusal:
        self._awaiting_reset = True
        return Refusal(code=code, message=message, digest=own_digest)

    def fail_step(self) -> None:
        """The applied step was not computed: rows keep what they had computed before it."""
        self._pending = []
        self._awaiting_reset = True

    def complete(self, output: StepOutput) -> CompletedStep:
        """Books the output of the applied step. RunnerOutputError leaves all as before the step."""
        pending, failures = self._pending, dict(output.failures)
        self._check(output, failures)
        self._pending = []
        slots: list[int] = []
        token_ids: list[int] = []
        finished: list[Row] = []
        faults: list[Fault] = []
        builders: dict[bytes, _BatchBuilder] = {}
        sampled = iter(output.token_ids)
        for index, entry in enumerate(pending):
            row = entry.row
            token = next(sampled) if entry.samples else None
            failed = index in failures or (entry.samples and token is None)
            if failed:
                row.ended = FinishReason.ERROR
                faults.append(_row_fault(row, failures.get(index, "no token was sampled")))
            else:
                row.num_computed += entry.num_tokens
                if token is not None:
                    slots.append(row.slot)
                    token_ids.append(token)
                    row.ended = self._append(row, token)
            if row.ended is not None:
                finished.append(row)
            if row.ended is not None or len(row.tokens) - row.prompt_len > row.num_emitted:
                builder = builders.get(row.reply_to)
                if builder is None:
                    builder = builders[row.reply_to] = _BatchBuilder()
                _emit(row, builder)
        self._recent.extend(_finished(row) for row in finished)
        return CompletedStep(
            slots=slots,
            token_ids=token_ids,
            finished_slots=[row.slot for row in finished],
            finish_reasons=[row.ended for row in finished if row.ended is not None],
            faults=faults,
            batches=[(reply_to, b.build(self._step)) for reply_to, b in builders.items()],
        )

    def cancel(self, request_ids: Collection[bytes]) -> int:
        """Ends the rows of these requests; returns how many there were. Not during a step."""
        assert not self._pending, "rows of a running step can't be ended"
        ended = 0
        for row in self._state.table.values():
            if row.ended is None and row.request_id in request_ids:
                row.ended = FinishReason.CANCELLED
                self._recent.append(_finished(row))
                ended += 1
        return ended

    def snapshot(self) -> Snapshot:
        """Rows that have not ended, and the last MAX_RECENT_FINISHES ends."""
        rows = [row for row in self._state.table.values() if row.ended is None]
        return Snapshot(
            slots=[
                SlotState(
                    slot=row.slot,
                    generation=row.generation,
                    request_id=row.request_id,
                    attempt=row.attempt,
                    num_computed_tokens=row.num_computed,
                    num_output_tokens=row.num_outputs,
                )
                for row in rows
            ],
            recent_finishes=list(self._recent),
        )

    def check_invariants(self) -> None:
        """Recomputes what is kept incrementally; for tests."""
        state = self._state
        total = 0
        for slot, row in state.table.items():
            assert row.slot == slot
            assert row.digest == digest.table_sum(slot, row.generation, 0, row.blocks)
            assert row.num_computed <= len(row.tokens)
            total = digest.add(total, row.digest)
        assert total == state.digest
        assert state.schedule.keys() <= state.table.keys()
        assert not state.growth

    def _append(self, row: Row, token: int) -> FinishReason | None:
        """The row's next known token; says whether it is the last."""
        position = row.num_outputs
        row.tokens.append(token)
        if token in row.stop_ids and position >= row.sampling.min_tokens:
            return FinishReason.STOP
        if position + 1 >= row.sampling.max_tokens:
            return FinishReason.LENGTH
        if len(row.tokens) >= self._limits.max_model_len:
            return FinishReason.LENGTH
        return None

    def _check(self, output: StepOutput, failures: dict[int, str]) -> None:
        num_sampling = sum(entry.samples for entry in self._pending)
        if len(output.token_ids) != num_sampling:
            raise RunnerOutputError(f"{len(output.token_ids)} tokens for {num_sampling} rows")
        if any(not 0 <= index < len(self._pending) for index in failures):
            raise RunnerOutputError("a failure names no row of the step")
        for token in output.token_ids:
            if token is not None and not 0 <= token < self._limits.vocab_size:
                raise RunnerOutputError(f"token {token} is not in the vocabulary")


def _emit(row: Row, builder: _BatchBuilder) -> None:
    """All known output that has not been sent; from `emit_from` in a row's first batch."""
    first = row.num_emitted
    tokens = row.tokens[row.prompt_len + first :]
    row.num_emitted = first + len(tokens)
    builder.request_ids.append(row.request_id)
    builder.attempts.append(row.attempt)
    builder.first_positions.append(first)
    builder.num_tokens.append(len(tokens))
    builder.token_ids.extend(tokens)
    builder.finish_reasons.append(0 if row.ended is None else row.ended)
    builder.num_cached_tokens.append(row.num_cached)


def _finished(row: Row) -> FinishedRequest:
    assert row.ended is not None, "only ended rows are finished"
    return FinishedRequest(request_id=row.request_id, attempt=row.attempt, finish_reason=row.ended)


def _row_fault(row: Row, message: str) -> Fault:
    return Fault(scope=FaultScope.REQUEST, code=FaultCode.COMPUTE, slot=row.slot, message=message)
