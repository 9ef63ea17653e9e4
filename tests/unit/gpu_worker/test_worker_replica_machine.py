"""Random valid plans against a model of the worker that keeps whole lists and no differences."""

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpu_worker.messages import Admit, FinishReason, TokenLogprobs
from gpu_worker.ports import SamplingSpec, StepOutput
from gpu_worker.replica import AppliedPlan, Replica
from tests.stub_worker.fake_runner import fake_logprobs
from tests.worker_builders import GATEWAY_A, GATEWAY_B, LIMITS, PlanScript, make_admit, request_id

STOP_TOKEN = 7
WANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_logprobs": 0},
    {"num_logprobs": 2},
    {"num_logprobs": 1, "prompt_logprobs": True},
)


@dataclass
class NaiveRow:
    """A request as a single worker without plans would keep it."""

    admit: Admit
    outputs: list[int]
    blocks: list[int]
    computed: int
    given: int
    ended: FinishReason | None = None

    @property
    def tokens(self) -> list[int]:
        return list(self.admit.token_ids[: self.admit.prompt_len]) + self.outputs

    @property
    def scored_from(self) -> int:
        """Place of the first token whose logprob is wanted; behind all where none is."""
        spec = self.admit.sampling
        if spec.num_logprobs is None:
            return 10**6
        if spec.prompt_logprobs and self.admit.emit_from == 0:
            return 1
        return self.admit.prompt_len + self.admit.emit_from

    @property
    def sendable(self) -> list[int]:
        """Output that has not been given; with logprobs, what of it follows computed tokens."""
        end = len(self.outputs)
        if self.admit.sampling.num_logprobs is not None:
            end = min(end, max(0, self.computed + 1 - self.admit.prompt_len))
        return self.outputs[self.given : end]


@dataclass
class Change:
    """What the next plan will say."""

    admits: list[Admit] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    growth: list[tuple[int, int]] = field(default_factory=list)


class ReplicaMachine(RuleBasedStateMachine):
    """Writes plans from the naive rows, and checks what the replica makes of them."""

    @initialize()
    def start(self) -> None:
        self.replica = Replica(LIMITS)
        self.script = PlanScript()
        self.rows: dict[int, NaiveRow] = {}
        self.generations: dict[int, int] = {}
        self.free = list(range(LIMITS.num_blocks))
        self.scheduled: dict[int, int] = {}
        self.change = Change()
        self.num_requests = 0

    @rule(
        slot=st.integers(0, LIMITS.num_slots - 1),
        tokens=st.lists(st.integers(0, 99), min_size=1, max_size=20),
        num_outputs=st.integers(0, 3),
        max_tokens=st.integers(4, 12),
        data=st.data(),
    )
    def admit(
        self, slot: int, tokens: list[int], num_outputs: int, max_tokens: int, data: st.DataObject
    ) -> None:
        num_blocks = -(-len(tokens) // LIMITS.block_size)
        if slot in self.rows or len(self.free) < num_blocks:
            return
        self.num_requests += 1
        self.generations[slot] = self.generations.get(slot, 0) + 1
        num_outputs = min(num_outputs, len(tokens) - 1)
        prompt_len = len(tokens) - num_outputs
        emit_from = data.draw(st.integers(0, num_outputs))
        wants = data.draw(st.sampled_from(WANTS))
        most = len(tokens) - 1 if not wants else prompt_len - 1 + emit_from
        if "prompt_logprobs" in wants and emit_from == 0:
            most = 0
        blocks = [self.free.pop() for _ in range(num_blocks)]
        admit = make_admit(
            slot,
            generation=self.generations[slot],
            request_id=request_id(self.num_requests),
            reply_to=data.draw(st.sampled_from([GATEWAY_A, GATEWAY_B])),
            token_ids=tuple(tokens),
            prompt_len=prompt_len,
            emit_from=emit_from,
            num_computed_tokens=data.draw(st.integers(0, most)),
            block_ids=tuple(blocks),
            sampling=SamplingSpec(max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,), **wants),
        )
        self.change.admits.append(admit)
        self.rows[slot] = NaiveRow(
            admit=admit,
            outputs=tokens[admit.prompt_len :],
            blocks=blocks,
            computed=admit.num_computed_tokens,
            given=admit.emit_from,
        )

    @rule(slot=st.integers(0, LIMITS.num_slots - 1))
    def release(self, slot: int) -> None:
        row = self.rows.get(slot)
        if row is None or any(admit.slot == slot for admit in self.change.admits):
            return
        self.change.releases.append(slot)
        self.change.growth = [(s, b) for s, b in self.change.growth if s != slot]
        self.free.extend(row.blocks)
        del self.rows[slot]
        self.scheduled.pop(slot, None)

    @rule(slots=st.sets(st.integers(0, LIMITS.num_slots - 1)))
    def cancel(self, slots: set[int]) -> None:
        """Also of rows whose admission is still to come."""
        announced = {admit.slot for admit in self.change.admits}
        gone = {slot: self.rows[slot] for slot in slots & self.rows.keys()}
        ids = {row.admit.request_id for row in gone.values()}
        expected = sum(row.ended is None for s, row in gone.items() if s not in announced)
        for row in gone.values():
            row.ended = row.ended or FinishReason.CANCELLED
        assert self.replica.cancel(ids) == expected

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        wanted = self.choose(data)
        changed = [(s, n) for s, n in wanted.items() if self.scheduled.get(s) != n]
        changed += [(s, 0) for s in self.scheduled if s not in wanted]
        plan = self.script.plan(
            admits=self.change.admits,
            releases=self.change.releases,
            growth=self.change.growth,
            schedule=changed,
        )
        left_out = {
            slot: FinishReason.CANCELLED
            for slot in wanted
            if self.rows[slot].ended is FinishReason.CANCELLED
        }
        self.change = Change()
        self.scheduled = wanted
        applied = self.replica.apply(plan)
        assert isinstance(applied, AppliedPlan), applied
        self.replica.check_invariants()
        self.check_rows(applied)
        sampled = [data.draw(st.integers(0, 20)) for row in applied.rows if row.samples]
        done = self.replica.complete(self.output(applied, sampled))
        self.replica.check_invariants()
        expected = self.advance(applied, sampled)
        ended = {slot: row.ended for slot, row in expected.items() if row.ended is not None}
        given = dict(zip(done.finished_slots, done.finish_reasons, strict=True))
        assert given == left_out | ended
        self.check_batches(done.batches, expected)

    def output(self, applied: AppliedPlan, sampled: list[int]) -> StepOutput:
        """What a runner says, with made-up logprobs of the tokens it is asked for."""
        tokens = iter(sampled)
        logprobs = []
        for index, row in enumerate(applied.rows):
            scored = [*row.scored_token_ids, *((next(tokens),) if row.samples else ())]
            if row.sampling.num_logprobs is not None:
                logprobs.append((index, fake_logprobs(scored, row.sampling.num_logprobs, 100)))
        return StepOutput(token_ids=tuple(sampled), logprobs=tuple(logprobs))

    def choose(self, data: st.DataObject) -> dict[int, int]:
        """Rows for the step, with growth where their tables are too short."""
        wanted: dict[int, int] = {}
        budget = LIMITS.max_num_batched_tokens
        for slot, row in self.rows.items():
            if not data.draw(st.booleans()):
                continue
            if row.ended is not None:
                wanted[slot] = 1
                continue
            most = min(len(row.tokens) - row.computed, budget)
            if most < 1:
                continue
            count = data.draw(st.integers(1, most))
            while row.computed + count > len(row.blocks) * LIMITS.block_size and self.free:
                block = self.free.pop()
                row.blocks.append(block)
                self.change.growth.append((slot, block))
            if row.computed + count <= len(row.blocks) * LIMITS.block_size:
                wanted[slot] = count
                budget -= count
        return wanted

    def check_rows(self, applied: AppliedPlan) -> None:
        alive = {slot for slot in self.scheduled if self.rows[slot].ended is None}
        assert {row.slot for row in applied.rows} == alive
        assert applied.num_wasted_rows == len(self.scheduled) - len(alive)
        for row in applied.rows:
            naive, count = self.rows[row.slot], self.scheduled[row.slot]
            end = naive.computed + count
            assert list(row.token_ids) == naive.tokens[naive.computed : end]
            assert (row.start, list(row.block_ids)) == (naive.computed, naive.blocks)
            assert row.samples == (end == len(naive.tokens))
            assert row.output_position == len(naive.outputs)
            wanted = range(max(naive.computed + 1, naive.scored_from), end + 1)
            scored = [naive.tokens[place] for place in wanted if place < len(naive.tokens)]
            assert list(row.scored_token_ids) == scored

    def advance(self, applied: AppliedPlan, sampled: list[int]) -> dict[int, NaiveRow]:
        tokens = iter(sampled)
        for row in applied.rows:
            naive = self.rows[row.slot]
            naive.computed += self.scheduled[row.slot]
            if not row.samples:
                continue
            token = next(tokens)
            naive.outputs.append(token)
            if token == STOP_TOKEN:
                naive.ended = FinishReason.STOP
            elif (
                len(naive.outputs) == naive.admit.sampling.max_tokens
                or len(naive.tokens) == LIMITS.max_model_len
            ):
                naive.ended = FinishReason.LENGTH
        return {row.slot: self.rows[row.slot] for row in applied.rows}

    def check_batches(self, batches: object, expected: dict[int, NaiveRow]) -> None:
        given: dict[bytes, tuple[bytes, int, list[int]]] = {}
        scored: dict[bytes, TokenLogprobs] = {}
        for reply_to, batch in batches:  # type: ignore[attr-defined]
            at = 0
            for index, request in enumerate(batch.request_ids):
                count = batch.num_tokens[index]
                tokens = batch.token_ids[at : at + count]
                given[request] = (reply_to, batch.first_positions[index], tokens)
                at += count
            scored |= {batch.request_ids[entry.entry]: entry for entry in batch.logprobs}
        for row in expected.values():
            new = row.sendable
            entry = given.pop(row.admit.request_id, None)
            if new or row.ended is not None:
                assert entry == (row.admit.reply_to, row.given, new)
            else:
                assert entry is None
            self.check_logprobs(row, new, scored.pop(row.admit.request_id, None))
            row.given += len(new)
        assert not given
        assert not scored

    def check_logprobs(self, row: NaiveRow, new: list[int], entry: TokenLogprobs | None) -> None:
        """One for each token that is sent, after those of the prompt with output position 0."""
        spec = row.admit.sampling
        if spec.num_logprobs is None or not new:
            assert entry is None
            return
        assert entry is not None
        whole = spec.prompt_logprobs and row.given == 0
        prompt = row.admit.token_ids[1 : row.admit.prompt_len] if whole else ()
        assert entry.num_prompt_rows == len(prompt)
        expected = fake_logprobs([*prompt, *new], spec.num_logprobs, 100)
        assert (entry.num_top, entry.logprobs) == (expected.num_top, expected.logprobs)
        assert entry.top_token_ids == expected.top_token_ids
        assert entry.top_logprobs == expected.top_logprobs

    @invariant()
    def live_rows_agree(self) -> None:
        announced = {admit.slot for admit in self.change.admits}
        released = set(self.change.releases)
        if released:
            return
        alive = {s: r for s, r in self.rows.items() if r.ended is None and s not in announced}
        states = {state.slot: state for state in self.replica.snapshot().slots}
        assert states.keys() == alive.keys()
        for slot, row in alive.items():
            assert states[slot].num_computed_tokens == row.computed
            assert states[slot].num_output_tokens == len(row.outputs)


ReplicaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestReplicaMachine = ReplicaMachine.TestCase
