"""The worker's copy of the slot table, built from plans and from the tokens it samples itself.

Pure; one owner at a time. `apply` checks a whole plan before it changes anything: a plan that
breaks the protocol is refused as a value and leaves the table as it was. After any refusal every
plan is refused until one with `reset`, because plans are differences and the later ones stand on
the refused one.

Invariants: a row's digest is the sum over its block table, the replica's the sum of its rows'; a
scheduled slot is a slot of the table; a row to compute has tokens and blocks for what is planned,
no two of them write to one block, and none uses a block under a swap as operations.py forbids.

A cancel may come before its request's admission, which waits in a plan: the row then ends as it is
admitted. The last MAX_EARLY_CANCELS such ids are kept; one that was forgotten is computed until
its gateway, which does not know it any more, cancels it again.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from gpu_worker import digest
from gpu_worker.messages import (
    MAX_BATCH_LOGPROBS,
    MAX_BATCH_TOKENS,
    Fault,
    FaultCode,
    FaultScope,
    FinishedRequest,
    FinishReason,
    SlotState,
    Snapshot,
    StepPlan,
    TokenBatch,
    TokenLogprobs,
)
from gpu_worker.operations import InFlight, check_rows
from gpu_worker.ports import LogprobRows, Operation, ScheduledRow, StepOutput
from gpu_worker.slot_table import (
    InvalidPlanError,
    PendingRow,
    ReplicaLimits,
    Row,
    RowScores,
    TableState,
    stage,
    stage_rows,
)

MAX_RECENT_FINISHES = 4096
MAX_EARLY_CANCELS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The plan is not computed. `digest` is the worker's, after the plan where it got so far."""

    code: FaultCode
    message: str
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedPlan:
    """The step to compute; may have no rows. The operations come before them."""

    rows: Sequence[ScheduledRow]
    operations: Sequence[Operation]
    num_tokens: int
    num_wasted_rows: int
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedStep:
    """What the step gave: result columns, and under its reply_to a gateway's batch.

    More than one batch where tokens that are repeated, or logprobs, would make it too large.
    """

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
        self.logprobs: list[TokenLogprobs] = []
        self.num_logprobs = 0

    def add(self, row: Row, tokens: Sequence[int], reason: FinishReason | None) -> None:
        """An entry with the row's next tokens; they count as emitted."""
        self.request_ids.append(row.request_id)
        self.attempts.append(row.attempt)
        self.first_positions.append(row.num_emitted)
        self.num_tokens.append(len(tokens))
        self.token_ids.extend(tokens)
        self.finish_reasons.append(0 if reason is None else reason)
        self.num_cached_tokens.append(row.num_cached)
        row.num_emitted += len(tokens)

    def add_logprobs(self, scores: RowScores, begin: int, end: int) -> None:
        """Logprobs of the entry added last: some of the rows that are there."""
        k = scores.num_top
        entry = TokenLogprobs(
            entry=len(self.request_ids) - 1,
            num_prompt_rows=scores.num_prompt_rows if begin == 0 else 0,
            num_top=k,
            logprobs=scores.logprobs[begin:end],
            top_token_ids=scores.top_token_ids[begin * k : end * k],
            top_logprobs=scores.top_logprobs[begin * k : end * k],
        )
        self.logprobs.append(entry)
        self.num_logprobs += entry.num_values

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
            logprobs=self.logprobs,
        )


class _Outgoing:
    """Batches of one step, split where tokens or logprobs would be too many for a message."""

    def __init__(self) -> None:
        self.open: dict[bytes, _BatchBuilder] = {}
        self._full: list[tuple[bytes, _BatchBuilder]] = []

    def builder(self, reply_to: bytes, num_logprobs: int = 0) -> _BatchBuilder:
        """The open one if it has room for so many logprobs; otherwise a new one."""
        builder = self.open.get(reply_to)
        if builder is not None and num_logprobs:
            if builder.num_logprobs + num_logprobs <= MAX_BATCH_LOGPROBS:
                return builder
            builder = None
        return builder or self.fresh(reply_to)

    def fresh(self, reply_to: bytes) -> _BatchBuilder:
        """A new one; the one that was open is full."""
        full = self.open.get(reply_to)
        if full is not None:
            self._full.append((reply_to, full))
        builder = self.open[reply_to] = _BatchBuilder()
        return builder

    def build(self, step: int) -> list[tuple[bytes, TokenBatch]]:
        """In the order in which each gateway is to get its own."""
        return [(to, builder.build(step)) for to, builder in (*self._full, *self.open.items())]


class Replica:
    """The slot table. Not thread-safe."""

    def __init__(self, limits: ReplicaLimits) -> None:
        self._limits = limits
        self._state = TableState()
        self._epoch = 0
        self._step = 0
        self._awaiting_reset = True
        self._pending: list[PendingRow] = []
        self._in_flight = InFlight()
        self._recent: deque[FinishedRequest] = deque(maxlen=MAX_RECENT_FINISHES)
        self._early_cancels: dict[bytes, None] = {}
        # Rows that the applied plan schedules and that cancels have ended.
        self._cancelled: list[Row] = []

    @property
    def digest(self) -> int:
        """Sum over all tables."""
        return self._state.digest

    @property
    def epoch(self) -> int:
        """Of the last plan that was taken."""
        return self._epoch

    @property
    def num_operations(self) -> int:
        """Operations that have not been said to be done."""
        return len(self._in_flight)

    @property
    def awaiting_reset(self) -> bool:
        """Only a plan with `reset` would be taken."""
        return self._awaiting_reset

    @property
    def num_live_rows(self) -> int:
        """Rows that have not ended."""
        return sum(row.ended is None for row in self._state.table.values())

    def apply(self, plan: StepPlan) -> AppliedPlan | Refusal:
        """Changes the table to what the plan says, or nothing at all.

        With a plan of a new epoch no operation may be in flight.
        """
        if not plan.reset and (self._awaiting_reset or plan.epoch != self._epoch):
            message = "only a plan with reset is taken now"
            return self._refuse(FaultCode.AWAITING_RESET, message, self.digest)
        try:
            after = stage(self._state, plan, self._limits)
            if after.digest != plan.digest:
                # Before the rows are checked: tables that differ explain what is wrong with rows.
                message = f"digest is {after.digest:016x}, the plan has {plan.digest:016x}"
                return self._refuse(FaultCode.DIGEST_MISMATCH, message, after.digest)
            ended = self._cancelled_before(plan, after)
            new_epoch = plan.epoch != self._epoch
            busy = self._in_flight.stage(plan.operations, self._limits, new_epoch=new_epoch)
            pending, rows, wasted = stage_rows(after, self._limits)
            if busy is not None:
                check_rows(busy, rows, after.growth, self._limits.block_size)
        except InvalidPlanError as error:
            return self._refuse(FaultCode.INVALID_PLAN, str(error), self.digest)
        self._in_flight.commit(plan.operations, new_epoch=new_epoch)
        after.commit_growth()
        self._state = after
        self._recent.extend(_finished(row) for row in ended)
        self._pending = pending
        self._cancelled = [row for row in wasted if row.ended is FinishReason.CANCELLED]
        self._epoch, self._step, self._awaiting_reset = plan.epoch, plan.step, False
        return AppliedPlan(
            rows=rows,
            operations=plan.operations,
            num_tokens=sum(entry.num_tokens for entry in pending),
            num_wasted_rows=len(wasted),
            digest=self.digest,
        )

    def _refuse(self, code: FaultCode, message: str, own_digest: int) -> Refusal:
        self._awaiting_reset = True
        return Refusal(code=code, message=message, digest=own_digest)

    def operations_done(self, op_ids: Collection[int]) -> None:
        """Their blocks may be used again."""
        self._in_flight.done(op_ids)

    def fail_step(self) -> None:
        """The applied step was not computed: rows keep what they had computed before it."""
        self._pending, self._cancelled = [], []
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
        outgoing = _Outgoing()
        logprobs = dict(output.logprobs)
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
                if row.scores is not None and index in logprobs:
                    row.scores.add(logprobs[index])
                if token is not None:
                    slots.append(row.slot)
                    token_ids.append(token)
                    row.ended = self._append(row, token)
            if row.ended is not None:
                finished.append(row)
            if row.scores is not None:
                _emit_scored(row, row.scores, outgoing)
            elif row.ended is not None or len(row.tokens) - row.prompt_len > row.num_emitted:
                # All known output that has not been sent; in its first batch from emit_from on.
                tokens = row.tokens[row.prompt_len + row.num_emitted :]
                builder = outgoing.open.get(row.reply_to)
                if builder is None or len(builder.token_ids) + len(tokens) > MAX_BATCH_TOKENS:
                    builder = outgoing.fresh(row.reply_to)
                builder.add(row, tokens, row.ended)
        self._recent.extend(_finished(row) for row in finished)
        # The scheduler may not know of the cancels, nor which rows they have left out.
        finished += self._cancelled
        self._cancelled = []
        return CompletedStep(
            slots=slots,
            token_ids=token_ids,
            finished_slots=[row.slot for row in finished],
            finish_reasons=[row.ended for row in finished if row.ended is not None],
            faults=faults,
            batches=outgoing.build(self._step),
        )

    def cancel(self, request_ids: Collection[bytes]) -> int:
        """Ends the rows of these requests, now or at their admission; returns how many at once.

        Not during a step.
        """
        assert not self._pending, "rows of a running step can't be ended"
        early, ended = dict.fromkeys(request_ids), 0
        for row in self._state.table.values():
            if row.request_id in request_ids:
                early.pop(row.request_id, None)
                if row.ended is None:
                    row.ended = FinishReason.CANCELLED
                    self._recent.append(_finished(row))
                    ended += 1
        self._early_cancels |= early
        surplus = max(0, len(self._early_cancels) - MAX_EARLY_CANCELS)
        for request_id in list(islice(self._early_cancels, surplus)):
            del self._early_cancels[request_id]
        return ended

    def _cancelled_before(self, plan: StepPlan, after: TableState) -> list[Row]:
        """Ends the rows that the plan admits although their clients are gone."""
        rows = [after.table[a.slot] for a in plan.admits if a.request_id in self._early_cancels]
        for row in rows:
            row.ended = FinishReason.CANCELLED
        return rows

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
        if row.history is not None:
            row.history.append(token)
        if token in row.stop_ids and position >= row.sampling.min_tokens:
            return FinishReason.STOP
        if position + 1 >= row.sampling.max_tokens:
            return FinishReason.LENGTH
        if len(row.tokens) >= self._limits.max_model_len:
            return FinishReason.LENGTH
        return None

    def _check(self, output: StepOutput, failures: dict[int, str]) -> None:
        num_sampling, some_scored = 0, False
        for entry in self._pending:
            num_sampling += entry.samples
            some_scored |= entry.row.scores is not None
        if len(output.token_ids) != num_sampling:
            raise RunnerOutputError(f"{len(output.token_ids)} tokens for {num_sampling} rows")
        if any(not 0 <= index < len(self._pending) for index in failures):
            raise RunnerOutputError("a failure names no row of the step")
        for token in output.token_ids:
            if token is not None and not 0 <= token < self._limits.vocab_size:
                raise RunnerOutputError(f"token {token} is not in the vocabulary")
        if some_scored:
            self._check_logprobs(output, failures)

    def _check_logprobs(self, output: StepOutput, failures: dict[int, str]) -> None:
        given, sampled = dict(output.logprobs), iter(output.token_ids)
        for index, entry in enumerate(self._pending):
            token = next(sampled) if entry.samples else None
            scores = entry.row.scores
            if scores is None or index in failures or (entry.samples and token is None):
                continue
            wanted, rows = entry.num_scored + (token is not None), given.get(index)
            if rows is None:
                if wanted:
                    raise RunnerOutputError(f"row {index} lacks {wanted} logprobs")
            elif not _fits(rows, wanted, entry.row):
                raise RunnerOutputError(f"logprobs of row {index} do not fit {wanted} tokens")


def _fits(rows: LogprobRows, wanted: int, row: Row) -> bool:
    return (
        len(rows.logprobs) == wanted
        and len(rows.top_token_ids) == len(rows.top_logprobs) == wanted * rows.num_top
        and rows.num_top <= (row.sampling.num_logprobs or 0)
    )


def _emit_scored(row: Row, scores: RowScores, outgoing: _Outgoing) -> None:
    """The output whose logprobs are there, in pieces that a message can hold.

    After a failure the rest of the known output is not sent: nobody will score it.
    """
    num_rows, num_prompt = len(scores.logprobs), scores.num_prompt_rows
    if num_rows <= num_prompt:
        if row.ended is not None:
            outgoing.builder(row.reply_to).add(row, (), row.ended)
        return
    at_once = MAX_BATCH_LOGPROBS // (1 + scores.num_top)
    for begin in range(0, num_rows, at_once):
        end = min(begin + at_once, num_rows)
        first = row.prompt_len + row.num_emitted
        tokens = row.tokens[first : first + end - max(begin, num_prompt)]
        builder = outgoing.builder(row.reply_to, (end - begin) * (1 + scores.num_top))
        builder.add(row, tokens, row.ended if end == num_rows else None)
        builder.add_logprobs(scores, begin, end)
    row.scores = RowScores(scored_from=scores.scored_from, num_prompt_rows=0)


def _finished(row: Row) -> FinishedRequest:
    assert row.ended is not None, "only ended rows are finished"
    return FinishedRequest(request_id=row.request_id, attempt=row.attempt, finish_reason=row.ended)


def _row_fault(row: Row, message: str) -> Fault:
    return Fault(
        scope=FaultScope.REQUEST, code=FaultCode.COMPUTE, slot=row.slot, message=message[:500]
    )
