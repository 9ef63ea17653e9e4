"""Builders for tests of the scheduler core, and a worker that mirrors plans naively.

The FakeWorker shares no code with the core but its value types: it has a digest, a slot table and a
picture of the KV cache of its own, and raises AssertionError where a real worker would refuse a
plan or compute nonsense.
"""

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler_svc.core import CoreConfig, SchedulerCore
from scheduler_svc.core.events import (
    BecameLeader,
    RequestArrived,
    StepCompleted,
    StepFailed,
    WorkerJoined,
)
from scheduler_svc.core.ready import Admit, StepPlan
from scheduler_svc.core.types import (
    CostProfile,
    FaultScope,
    FinishReason,
    RequestId,
    SamplingSpec,
    Slot,
    WorkerCapacity,
    WorkerId,
)
from tests.fake_blocks import FakeBlocks

GATEWAY = "gateway"
_MASK = (1 << 64) - 1


def make_core(**config: Any) -> SchedulerCore:
    """A core that leads epoch 1, without workers."""
    core = SchedulerCore(CoreConfig(**config))
    core.feed(BecameLeader(now_ns=0, epoch=1))
    return core


def make_worker(
    name: str = "w",
    *,
    gateways: Sequence[str] = (GATEWAY,),
    now_ns: int = 0,
    snapshot_attempts: Mapping[RequestId, int] | None = None,
    token_us: float = 0.0,
    swap_gb_per_s: float = 0.0,
    **capacity: int,
) -> WorkerJoined:
    """The joining of a worker with 8 slots and 64 blocks of 4 tokens unless told otherwise.

    It has no host blocks and does not know its costs. A block has 4,000 bytes.
    """
    numbers = {
        "num_slots": 8,
        "num_blocks": 64,
        "block_size": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 1024,
        "block_bytes": 4000,
    }
    return WorkerJoined(
        now_ns=now_ns,
        worker_id=WorkerId(name),
        capacity=WorkerCapacity(**(numbers | capacity)),
        cost=CostProfile(
            token_us=token_us, swap_out_gb_per_s=swap_gb_per_s, swap_in_gb_per_s=swap_gb_per_s
        ),
        gateway_ids=frozenset(gateways),
        snapshot_attempts=snapshot_attempts or {},
    )


def make_prompt(num_tokens: int, *, family: int = 0) -> tuple[int, ...]:
    """Prompts of one family are prefixes of each other."""
    return tuple((family * 7919 + i * 31) % 50021 for i in range(num_tokens))


def make_request(
    name: str = "a",
    *,
    prompt: int | Sequence[int] = 4,
    max_tokens: int = 3,
    stop_after: int | None = None,
    min_tokens: int = 0,
    family: int | None = None,
    outputs: int = 0,
    num_logprobs: int | None = None,
    prompt_logprobs: bool = False,
    **fields: Any,
) -> RequestArrived:
    """The arrival of request `name`; without `family` its prompt shares no prefix with others.

    stop_after makes the FakeWorker end it with a stop token as output number stop_after; `outputs`
    is how many of its tokens the client has been given already.
    """
    request_id = RequestId(name.encode())
    if isinstance(prompt, int):
        own = zlib.crc32(request_id) if family is None else family
        prompt = make_prompt(prompt, family=own)
    stops = () if stop_after is None else (token_at(request_id, stop_after - 1),)
    given = tuple(token_at(request_id, i) for i in range(outputs))
    filled: dict[str, Any] = {
        "now_ns": 0,
        "entry_id": f"{name}-{fields.get('attempt', 1)}",
        "gateway_id": GATEWAY,
        "reply_to": b"secret of " + str(fields.get("gateway_id", GATEWAY)).encode(),
        "output_token_ids": given,
    } | fields
    return RequestArrived(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingSpec(
            max_tokens=max_tokens,
            stop_token_ids=stops,
            min_tokens=min_tokens,
            num_logprobs=num_logprobs,
            prompt_logprobs=prompt_logprobs,
        ),
        **filled,
    )


def token_at(request_id: RequestId, position: int) -> int:
    """The token that every FakeWorker samples for a request at an output position."""
    return zlib.crc32(b"%b/%d" % (request_id, position)) % 100_003


def expected_output(arrival: RequestArrived) -> tuple[list[int], FinishReason]:
    """What an undisturbed request gets: its output and why it ends."""
    output: list[int] = []
    spec = arrival.sampling
    while True:
        token = token_at(arrival.request_id, len(output))
        output.append(token)
        if token in spec.stop_token_ids and len(output) > spec.min_tokens:
            return output, FinishReason.STOP
        if len(output) == spec.max_tokens:
            return output, FinishReason.LENGTH


@dataclass(slots=True)
class FakeRow:
    """A slot of the FakeWorker. `chain[i]` stands for the KV of token i after all before it."""

    admit: Admit
    tokens: list[int]
    blocks: list[int]
    num_computed: int
    num_emitted: int
    ended: FinishReason | None = None
    chain: list[int] = field(default_factory=list)

    def extend_chain(self) -> None:
        """Names the KV of every known token."""
        for token in self.tokens[len(self.chain) :]:
            self.chain.append(hash((self.chain[-1] if self.chain else 0, token)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """Tokens on their way from a worker to a gateway."""

    reply_to: bytes
    request_id: RequestId
    attempt: int
    first_position: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None


class FakeWorker:
    """Takes plans in order and answers them one by one. Mirrors the plan semantics of the wire."""

    def __init__(self, joined: WorkerJoined) -> None:
        self.worker_id = joined.worker_id
        self.capacity = joined.capacity
        self.plans: deque[StepPlan] = deque()
        self.outbox: list[Emission] = []
        self.num_wasted_rows = 0
        self.num_plans = 0
        self.steps: list[dict[Slot, int]] = []
        self.slots: dict[Slot, FakeRow] = {}
        self._generations: dict[Slot, int] = {}
        self._rows: dict[Slot, int] = {}
        self._awaiting_reset = True
        self._last_step: int | None = None
        self.memory = FakeBlocks(
            joined.capacity.num_blocks, joined.capacity.num_host_blocks, joined.capacity.block_size
        )

    def take(self, plan: StepPlan) -> None:
        """Queues a plan, one for each of its steps. Steps are consecutive."""
        assert plan.worker_id == self.worker_id
        assert self._last_step is None or plan.step == self._last_step + 1
        assert plan.num_steps == 1 or plan.num_scheduled_tokens == plan.num_rows > 0
        self._last_step = plan.step + plan.num_steps - 1
        self.num_plans += 1
        self.plans.append(plan)
        for step in range(plan.step + 1, self._last_step + 1):
            same = replace(plan, step=step, reset=False, releases=(), admits=(), operations=())
            self.plans.append(replace(same, changed=(), growth=()))

    def cancel(self, request_id: RequestId) -> None:
        """The gateway tells the worker that a client is gone; the row ends at once."""
        for row in self.slots.values():
            if row.admit.request_id == request_id:
                row.ended = row.ended or FinishReason.CANCELLED

    def next_result(
        self, *, now_ns: int = 0, fail: bool = False, num_done: int | None = None
    ) -> StepCompleted | StepFailed:
        """Answers the oldest plan. After a failure only a plan with `reset` is computed.

        num_done operations are done by then, all unless told otherwise; a step without rows waits
        for all. A failed step loses those that are not done.
        """
        plan = self.plans.popleft()
        if self._awaiting_reset and not plan.reset:
            return self._failure(plan, now_ns, "awaiting reset", ())
        self._apply(plan)
        num_begun = len(self.memory.in_flight)
        num_done = num_begun if num_done is None else min(num_done, num_begun)
        if fail:
            self._awaiting_reset = True
            done = self.memory.end(num_done)
            self.memory.drop()
            return self._failure(plan, now_ns, "planted", done)
        return self._compute(plan, now_ns, num_done if self._rows else num_begun)

    def _failure(
        self, plan: StepPlan, now_ns: int, reason: str, operations_done: tuple[int, ...]
    ) -> StepFailed:
        return StepFailed(
            now_ns=now_ns,
            worker_id=self.worker_id,
            step=plan.step,
            scope=FaultScope.STEP,
            reason=reason,
            operations_done=operations_done,
        )

    def _apply(self, plan: StepPlan) -> None:
        if plan.reset:
            self.slots.clear()
            self._rows.clear()
            self._awaiting_reset = False
            assert not plan.releases
            assert not self.memory.in_flight
        for slot in plan.releases:
            del self.slots[slot]
            self._rows.pop(slot, None)
        # Before the admissions, whose tables are checked at once.
        owned = {block for row in self.slots.values() for block in row.blocks}
        self.memory.begin(plan.operations, owned)
        for admit in plan.admits:
            self._admit(admit)
        for slot, block in plan.growth:
            assert 0 <= block < self.capacity.num_blocks
            self.slots[slot].blocks.append(block)
        for slot, count in plan.changed:
            assert slot in self.slots, "a row without a slot is scheduled"
            if count:
                self._rows[slot] = count
            else:
                del self._rows[slot]
        assert self.digest() == plan.digest, "the tables differ from the core's"

    def _admit(self, admit: Admit) -> None:
        slot = admit.slot
        assert 0 <= slot < self.capacity.num_slots
        assert slot not in self.slots, "an admission into a slot in use"
        assert admit.generation > self._generations.get(slot, 0)
        assert len(admit.token_ids) < admit.prompt_len + admit.sampling.max_tokens
        assert admit.num_computed_tokens < len(admit.token_ids), "nothing is left to compute"
        if admit.sampling.num_logprobs is not None:
            whole = admit.sampling.prompt_logprobs and admit.emit_from == 0
            wanted = 0 if whole else admit.prompt_len - 1 + admit.emit_from
            assert admit.num_computed_tokens <= wanted, "logits that logprobs need are not computed"
        self._generations[slot] = admit.generation
        row = FakeRow(
            admit=admit,
            tokens=list(admit.token_ids),
            blocks=list(admit.block_ids),
            num_computed=admit.num_computed_tokens,
            num_emitted=admit.emit_from,
        )
        row.extend_chain()
        self._check_kv(row)
        self.slots[slot] = row

    def digest(self) -> int:
        """Sum over all tables, straight from the definition on the wire."""
        total = 0
        for slot, row in self.slots.items():
            for index, block in enumerate(row.blocks):
                mixed = (
                    slot * 0x9E3779B97F4A7C15
                    ^ row.admit.generation * 0xC2B2AE3D27D4EB4F
                    ^ index * 0xD6E8FEB86659FD93
                    ^ block * 0xA0761D6478BD642F
                ) & _MASK
                mixed ^= mixed >> 32
                mixed = mixed * 0xD6E8FEB86659FD93 & _MASK
                total += mixed ^ (mixed >> 32)
        return total & _MASK

    def _compute(self, plan: StepPlan, now_ns: int, num_done: int) -> StepCompleted:
        assert len(self._rows) == plan.num_rows
        assert sum(self._rows.values()) == plan.num_scheduled_tokens
        assert plan.num_scheduled_tokens <= self.capacity.max_num_batched_tokens
        if self._rows:
            self.steps.append(dict(self._rows))
        sampled: list[tuple[Slot, int]] = []
        finished: list[tuple[Slot, FinishReason]] = []
        written: set[int] = set()
        num_wasted = 0
        for slot, count in sorted(self._rows.items()):
            row = self.slots[slot]
            if row.ended is not None:
                num_wasted += 1
                if row.ended is FinishReason.CANCELLED:
                    finished.append((slot, row.ended))
                continue
            self._write_kv(row, count, written)
            if row.num_computed < len(row.tokens):
                continue
            reason = self._sample(row)
            sampled.append((slot, row.tokens[-1]))
            if reason is not None:
                row.ended = reason
                finished.append((slot, reason))
            self._emit(row, reason)
        self.num_wasted_rows += num_wasted
        return StepCompleted(
            now_ns=now_ns,
            worker_id=self.worker_id,
            step=plan.step,
            slots=tuple(slot for slot, _ in sampled),
            token_ids=tuple(token for _, token in sampled),
            finished=tuple(finished),
            num_wasted_rows=num_wasted,
            operations_done=self.memory.end(num_done),
        )

    def _write_kv(self, row: FakeRow, count: int, written: set[int]) -> None:
        size = self.capacity.block_size
        end = row.num_computed + count
        assert end <= len(row.tokens), "more tokens are planned than the row knows"
        assert end <= len(row.blocks) * size, "the table does not cover what is planned"
        touched = set(row.blocks[row.num_computed // size : (end - 1) // size + 1])
        assert not touched & written, "two rows of a step write one block"
        self.memory.check_row(row.blocks[: -(-end // size)], touched)
        written |= touched
        for position in range(row.num_computed, end):
            self.memory.device[row.blocks[position // size]][position % size] = row.chain[position]
        row.num_computed = end
        self._check_kv(row)

    def _check_kv(self, row: FakeRow) -> None:
        """The row's blocks hold the KV of exactly its own tokens."""
        size = self.capacity.block_size
        for index, block in enumerate(row.blocks):
            known = row.chain[index * size : min((index + 1) * size, row.num_computed)]
            if not known:
                break
            content = self.memory.device[block][: len(known)]
            assert content == known, "a block holds another prefix's KV"

    def _sample(self, row: FakeRow) -> FinishReason | None:
        spec, position = row.admit.sampling, len(row.tokens) - row.admit.prompt_len
        token = token_at(row.admit.request_id, position)
        row.tokens.append(token)
        row.extend_chain()
        if token in spec.stop_token_ids and position >= spec.min_tokens:
            return FinishReason.STOP
        if position + 1 == spec.max_tokens or len(row.tokens) == self.capacity.max_model_len:
            return FinishReason.LENGTH
        return None

    def _emit(self, row: FakeRow, reason: FinishReason | None) -> None:
        output = row.tokens[row.admit.prompt_len :]
        self.outbox.append(
            Emission(
                reply_to=row.admit.reply_to,
                request_id=row.admit.request_id,
                attempt=row.admit.attempt,
                first_position=row.num_emitted,
                token_ids=tuple(output[row.num_emitted :]),
                finish=reason,
            )
        )
        row.num_emitted = len(output)
