"""What a plan would make of the slot table: every check of a plan, and no change to the table.

Pure. `stage` builds the state after a plan beside the present one; a plan that breaks the protocol
raises InvalidPlanError while the present state is untouched. The caller commits by assignment.
"""

import dataclasses
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu_worker import digest
from gpu_worker.messages import MAX_BATCH_LOGPROBS, Admit, FinishReason, StepPlan
from gpu_worker.ports import LogprobRows, SamplingSpec, ScheduledRow

ID_BYTES = 16
MAX_NUM_LOGPROBS = 20


class InvalidPlanError(Exception):
    """The plan breaks the protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLimits:
    """What a plan may name."""

    num_slots: int
    num_blocks: int
    block_size: int
    vocab_size: int
    max_model_len: int
    max_num_batched_tokens: int
    num_host_blocks: int = 0

    @property
    def max_blocks_per_row(self) -> int:
        """Blocks of the longest request."""
        return -(-self.max_model_len // self.block_size)


@dataclass(slots=True, kw_only=True)
class RowScores:
    """Logprobs that a row has had computed and not sent, of consecutive tokens.

    The first token of the row whose logprobs are wanted is tokens[scored_from]; the first
    num_prompt_rows of what is here belong to the prompt and go out with output position 0. At most
    max_model_len rows of 1 + MAX_NUM_LOGPROBS, since each position is computed once per admission.
    """

    scored_from: int
    num_prompt_rows: int
    num_top: int = 0
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    top_token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    top_logprobs: "array[float]" = field(default_factory=lambda: array("f"))

    def add(self, rows: LogprobRows) -> None:
        """What a step has computed."""
        self.num_top = rows.num_top
        self.logprobs.extend(rows.logprobs)
        self.top_token_ids.extend(rows.top_token_ids)
        self.top_logprobs.extend(rows.top_logprobs)


@dataclass(slots=True, kw_only=True)
class Row:
    """A used slot. tokens are prompt and output; the first num_computed of them have their KV."""

    slot: int
    generation: int
    request_id: bytes
    attempt: int
    reply_to: bytes
    tokens: list[int]
    prompt_len: int
    num_computed: int
    num_cached: int
    num_emitted: int
    blocks: list[int]
    digest: int
    sampling: SamplingSpec
    stop_ids: frozenset[int]
    # Only where logprobs are wanted, and where tokens that are there already are penalized.
    scores: RowScores | None = None
    history: "array[int] | None" = None
    ended: FinishReason | None = None

    @property
    def num_outputs(self) -> int:
        """Output tokens known, given ones included."""
        return len(self.tokens) - self.prompt_len


@dataclass(slots=True)
class PendingRow:
    """A row's part of the step being computed. Not frozen: there is one per row and step."""

    row: Row
    num_tokens: int
    samples: bool
    num_scored: int = 0


@dataclass(slots=True, kw_only=True)
class TableState:
    """The table as it is, or as a plan would leave it.

    growth holds the blocks that the plan adds to rows, not yet in the rows themselves.
    """

    table: dict[int, Row] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)
    schedule: dict[int, int] = field(default_factory=dict)
    digest: int = 0
    growth: dict[int, list[int]] = field(default_factory=dict)

    def commit_growth(self) -> None:
        """Moves the growth into the rows."""
        for slot, blocks in self.growth.items():
            row = self.table[slot]
            row.digest = digest.add(row.digest, _growth_sum(row, blocks))
            row.blocks.extend(blocks)
        self.growth = {}


def stage(now: TableState, plan: StepPlan, limits: ReplicaLimits) -> TableState:
    """The state after `plan`. Raises InvalidPlanError; `now` and its rows are not changed."""
    if plan.num_steps > 1:
        raise InvalidPlanError("a plan of several steps is to be taken apart first")
    if plan.reset:
        after = TableState()
    else:
        after = TableState(
            table=dict(now.table) if plan.release_slots or plan.admits else now.table,
            generations=dict(now.generations) if plan.admits else now.generations,
            schedule=dict(now.schedule),
            digest=now.digest,
        )
    for slot in plan.release_slots:
        row = after.table.pop(slot, None)
        if row is None:
            raise InvalidPlanError(f"slot {slot} is released but not in use")
        after.schedule.pop(slot, None)
        after.digest = digest.add(after.digest, -row.digest)
    for admit in plan.admits:
        _stage_admit(after, admit, limits)
    _stage_growth(after, plan, limits)
    _stage_changes(after, plan, limits)
    return after


def _stage_admit(after: TableState, admit: Admit, limits: ReplicaLimits) -> None:
    slot = admit.slot
    if slot >= limits.num_slots:
        raise InvalidPlanError(f"slot {slot} is outside the table of {limits.num_slots}")
    if slot in after.table:
        raise InvalidPlanError(f"slot {slot} is in use by another admission")
    newest = after.generations.get(slot, -1)
    if admit.generation <= newest:
        raise InvalidPlanError(
            f"generation {admit.generation} of slot {slot} does not follow {newest}"
        )
    _check_admit(admit, limits)
    row = Row(
        slot=slot,
        generation=admit.generation,
        request_id=admit.request_id,
        attempt=admit.attempt,
        reply_to=admit.reply_to,
        tokens=list(admit.token_ids),
        prompt_len=admit.prompt_len,
        num_computed=admit.num_computed_tokens,
        num_cached=admit.num_cached_tokens,
        num_emitted=admit.emit_from,
        blocks=list(admit.block_ids),
        digest=digest.table_sum(slot, admit.generation, 0, admit.block_ids),
        sampling=_without_unknown_tokens(admit.sampling, limits.vocab_size),
        stop_ids=frozenset(admit.sampling.stop_token_ids),
        scores=_scores(admit),
        history=array("i", admit.token_ids) if admit.sampling.penalizes else None,
    )
    after.table[slot] = row
    after.generations[slot] = admit.generation
    after.digest = digest.add(after.digest, row.digest)


def _check_admit(admit: Admit, limits: ReplicaLimits) -> None:
    num_tokens = len(admit.token_ids)
    num_outputs = num_tokens - admit.prompt_len
    sampling = admit.sampling
    checks = (
        (admit.generates, "unknown kind"),
        (len(admit.request_id) == ID_BYTES, "request id is not 16 bytes"),
        (len(admit.reply_to) == ID_BYTES, "reply_to is not 16 bytes"),
        (0 < num_tokens < limits.max_model_len, f"{num_tokens} tokens leave no room for one more"),
        (1 <= admit.prompt_len <= num_tokens, f"prompt_len {admit.prompt_len}"),
        (0 <= admit.num_computed_tokens < num_tokens, "every token is computed already"),
        (0 <= admit.emit_from <= num_outputs, f"emit_from {admit.emit_from}"),
        (_in_range(admit.token_ids, limits.vocab_size), "a token id is out of range"),
        (_in_range(admit.block_ids, limits.num_blocks), "a block id is out of range"),
        (len(set(admit.block_ids)) == len(admit.block_ids), "a block stands twice in a table"),
        (len(admit.block_ids) <= limits.max_blocks_per_row, "the table is too long"),
        (
            admit.num_computed_tokens <= len(admit.block_ids) * limits.block_size,
            "computed tokens without blocks",
        ),
        (sampling.max_tokens > num_outputs, f"max_tokens {sampling.max_tokens}"),
        (math.isfinite(sampling.temperature) and sampling.temperature >= 0, "temperature"),
        (0 < sampling.top_p <= 1, "top_p"),
        (0 <= sampling.min_p <= 1, "min_p"),
        (-2 <= sampling.presence_penalty <= 2, "presence_penalty"),
        (-2 <= sampling.frequency_penalty <= 2, "frequency_penalty"),
        (0 < sampling.repetition_penalty < math.inf, "repetition_penalty"),
        (all(token >= 0 and -100 <= bias <= 100 for token, bias in sampling.logit_bias), "bias"),
        (0 <= (sampling.num_logprobs or 0) <= MAX_NUM_LOGPROBS, "num_logprobs"),
        (sampling.num_logprobs is not None or not sampling.prompt_logprobs, "prompt_logprobs"),
    )
    for good, what in checks:
        if not good:
            raise InvalidPlanError(f"admission to slot {admit.slot}: {what}")
    scores = _scores(admit)
    if scores is None:
        return
    if admit.num_computed_tokens >= scores.scored_from:
        raise InvalidPlanError(
            f"admission to slot {admit.slot}: {admit.num_computed_tokens} tokens are computed, "
            f"logprobs are wanted from token {scores.scored_from}"
        )
    values = (scores.num_prompt_rows + 1) * (1 + (sampling.num_logprobs or 0))
    if values > MAX_BATCH_LOGPROBS:
        raise InvalidPlanError(
            f"admission to slot {admit.slot}: {values} prompt logprobs, "
            f"{MAX_BATCH_LOGPROBS} allowed"
        )


def _scores(admit: Admit) -> RowScores | None:
    """Empty; None where no logprobs are wanted."""
    if admit.sampling.num_logprobs is None:
        return None
    if admit.sampling.prompt_logprobs and admit.emit_from == 0:
        return RowScores(scored_from=1, num_prompt_rows=admit.prompt_len - 1)
    return RowScores(scored_from=admit.prompt_len + admit.emit_from, num_prompt_rows=0)


def _without_unknown_tokens(sampling: SamplingSpec, vocab_size: int) -> SamplingSpec:
    """A token outside the vocabulary never comes; the sampler must not index with it."""
    if all(bias[0] < vocab_size for bias in sampling.logit_bias) and _in_range(
        sampling.stop_token_ids, vocab_size
    ):
        return sampling
    return dataclasses.replace(
        sampling,
        stop_token_ids=tuple(t for t in sampling.stop_token_ids if 0 <= t < vocab_size),
        logit_bias=tuple(bias for bias in sampling.logit_bias if bias[0] < vocab_size),
    )


def _in_range(values: Sequence[int], bound: int) -> bool:
    return not values or (min(values) >= 0 and max(values) < bound)


def _stage_growth(after: TableState, plan: StepPlan, limits: ReplicaLimits) -> None:
    if len(plan.grow_slots) != len(plan.grow_block_ids):
        raise InvalidPlanError("growth columns differ in length")
    for slot, block in zip(plan.grow_slots, plan.grow_block_ids, strict=True):
        row = after.table.get(slot)
        if row is None:
            raise InvalidPlanError(f"slot {slot} grows but is not in use")
        if not 0 <= block < limits.num_blocks:
            raise InvalidPlanError(f"block {block} is out of range")
        blocks = after.growth.setdefault(slot, [])
        if block in row.blocks or block in blocks:
            raise InvalidPlanError(f"block {block} stands twice in the table of slot {slot}")
        if len(row.blocks) + len(blocks) >= limits.max_blocks_per_row:
            raise InvalidPlanError(f"the table of slot {slot} is longer than the longest request")
        blocks.append(block)
    for slot, blocks in after.growth.items():
        after.digest = digest.add(after.digest, _growth_sum(after.table[slot], blocks))


def _growth_sum(row: Row, blocks: Sequence[int]) -> int:
    return digest.table_sum(row.slot, row.generation, len(row.blocks), blocks)


def _stage_changes(after: TableState, plan: StepPlan, limits: ReplicaLimits) -> None:
    if len(plan.changed_slots) != len(plan.changed_num_tokens):
        raise InvalidPlanError("changed columns differ in length")
    if len(set(plan.changed_slots)) != len(plan.changed_slots):
        raise InvalidPlanError("a slot changes twice")
    for slot, num_tokens in zip(plan.changed_slots, plan.changed_num_tokens, strict=True):
        if slot not in after.table:
            raise InvalidPlanError(f"slot {slot} is scheduled but not in use")
        if num_tokens < 0:
            raise InvalidPlanError(f"slot {slot} has {num_tokens} tokens scheduled")
        if num_tokens:
            after.schedule[slot] = num_tokens
        else:
            after.schedule.pop(slot, None)


def stage_rows(
    after: TableState, limits: ReplicaLimits
) -> tuple[list[PendingRow], list[ScheduledRow], list[Row]]:
    """The rows to compute, and the scheduled rows that have ended.

    block_ids of a row is its live table: right once the growth is committed. Raises
    InvalidPlanError.
    """
    pending: list[PendingRow] = []
    scheduled: list[ScheduledRow] = []
    wasted: list[Row] = []
    written: set[int] = set()
    total = num_blocks_written = 0
    block_size = limits.block_size
    for slot, num_tokens in after.schedule.items():
        row = after.table[slot]
        if row.ended is not None:
            wasted.append(row)
            continue
        start = row.num_computed
        end = start + num_tokens
        known = len(row.tokens)
        if end > known:
            raise InvalidPlanError(f"slot {slot}: tokens up to {end} planned, {known} known")
        grown = after.growth.get(slot)
        blocks = row.blocks if grown is None else row.blocks + grown
        last = (end - 1) // block_size
        if last >= len(blocks):
            raise InvalidPlanError(f"slot {slot}: the table does not cover {end} tokens")
        total += num_tokens
        first = start // block_size
        if first == last:
            written.add(blocks[last])
        else:
            written.update(blocks[first : last + 1])
        num_blocks_written += last + 1 - first
        samples = end == known
        entry = PendingRow(row, num_tokens, samples)
        scored: Sequence[int] = ()
        if row.scores is not None:
            scored = row.tokens[max(start + 1, row.scores.scored_from) : end + 1]
            entry.num_scored = len(scored)
        pending.append(entry)
        scheduled.append(
            ScheduledRow(
                slot=slot,
                token_ids=row.tokens[start:end],
                start=start,
                block_ids=row.blocks,
                samples=samples,
                output_position=known - row.prompt_len,
                sampling=row.sampling,
                scored_token_ids=scored,
                history=row.history,
            )
        )
    if total > limits.max_num_batched_tokens:
        raise InvalidPlanError(f"{total} tokens planned, {limits.max_num_batched_tokens} allowed")
    if len(written) != num_blocks_written:
        raise InvalidPlanError("two rows write to the same block")
    return pending, scheduled, wasted
