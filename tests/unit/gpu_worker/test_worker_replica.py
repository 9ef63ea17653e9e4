"""The replica: what plans do to it, what they must not do, and what a step's tokens become."""

import dataclasses
import math
from collections.abc import Callable

import pytest

from gpu_worker import replica as replica_module
from gpu_worker.messages import FaultCode, FinishReason, StepPlan, TokenBatch
from gpu_worker.ports import SamplingSpec, StepOutput
from gpu_worker.replica import (
    MAX_EARLY_CANCELS,
    AppliedPlan,
    CompletedStep,
    Refusal,
    Replica,
    RunnerOutputError,
)
from tests.worker_builders import (
    GATEWAY_A,
    GATEWAY_B,
    LIMITS,
    PlanScript,
    make_admit,
    request_id,
)


def applied(replica: Replica, plan: StepPlan) -> AppliedPlan:
    result = replica.apply(plan)
    assert isinstance(result, AppliedPlan), result
    replica.check_invariants()
    return result


def refused(replica: Replica, plan: StepPlan) -> Refusal:
    result = replica.apply(plan)
    assert isinstance(result, Refusal), result
    replica.check_invariants()
    return result


def step(replica: Replica, plan: StepPlan, *tokens: int | None) -> CompletedStep:
    applied(replica, plan)
    return replica.complete(StepOutput(token_ids=tokens))


def entries(batch: TokenBatch) -> list[tuple[bytes, int, list[int], int]]:
    """(request, first position, tokens, finish) per entry."""
    found, at = [], 0
    for index, request in enumerate(batch.request_ids):
        count = batch.num_tokens[index]
        tokens = list(batch.token_ids[at : at + count])
        at += count
        found.append((request, batch.first_positions[index], tokens, batch.finish_reasons[index]))
    assert at == len(batch.token_ids)
    return found


@pytest.fixture
def replica() -> Replica:
    return Replica(LIMITS)


@pytest.fixture
def script() -> PlanScript:
    return PlanScript()


def test_a_prompt_is_computed_in_chunks_and_its_last_chunk_samples(
    replica: Replica, script: PlanScript
) -> None:
    first = applied(replica, script.plan(admits=[make_admit()], schedule=[(0, 3)]))
    (row,) = first.rows
    assert (list(row.token_ids), row.start, list(row.block_ids)) == ([11, 12, 13], 0, [0, 1])
    assert not row.samples
    done = replica.complete(StepOutput(token_ids=()))
    assert done == CompletedStep(
        slots=[], token_ids=[], finished_slots=[], finish_reasons=[], faults=[], batches=[]
    )
    second = applied(replica, script.plan(schedule=[(0, 2)]))
    (row,) = second.rows
    assert (list(row.token_ids), row.start, row.samples) == ([14, 15], 3, True)
    assert row.output_position == 0
    done = replica.complete(StepOutput(token_ids=(42,)))
    assert (done.slots, done.token_ids) == ([0], [42])
    third = applied(replica, script.plan(schedule=[(0, 1)]))
    (row,) = third.rows
    assert (list(row.token_ids), row.start, row.output_position) == ([42], 5, 1)


def test_an_unchanged_row_is_planned_again(replica: Replica, script: PlanScript) -> None:
    step(replica, script.plan(admits=[make_admit()], schedule=[(0, 5)]), 42)
    step(replica, script.plan(schedule=[(0, 1)]), 43)
    (row,) = applied(replica, script.plan()).rows
    assert (list(row.token_ids), row.start) == ([43], 6)
    replica.complete(StepOutput(token_ids=(44,)))
    assert applied(replica, script.plan(schedule=[(0, 0)])).rows == []
    assert replica.num_live_rows == 1


def test_each_gateway_gets_one_batch_a_step(replica: Replica, script: PlanScript) -> None:
    admits = [make_admit(0), make_admit(1, reply_to=GATEWAY_B), make_admit(2)]
    done = step(replica, script.plan(admits=admits, schedule=[(0, 5), (1, 5), (2, 5)]), 20, 21, 22)
    batches = dict(done.batches)
    assert batches.keys() == {GATEWAY_A, GATEWAY_B}
    assert entries(batches[GATEWAY_A]) == [
        (request_id(0), 0, [20], 0),
        (request_id(2), 0, [22], 0),
    ]
    assert entries(batches[GATEWAY_B]) == [(request_id(1), 0, [21], 0)]


def test_known_output_is_repeated_from_emit_from_in_the_first_batch(
    replica: Replica, script: PlanScript
) -> None:
    admit = make_admit(prompt_len=2, emit_from=1, attempt=3, num_cached_tokens=2)
    done = step(replica, script.plan(admits=[admit], schedule=[(0, 2)]))
    ((_, batch),) = done.batches
    assert entries(batch) == [(request_id(0), 1, [14, 15], 0)]
    assert (list(batch.attempts), list(batch.num_cached_tokens)) == ([3], [2])
    assert step(replica, script.plan()).batches == []
    done = step(replica, script.plan(schedule=[(0, 1)]), 42)
    ((_, batch),) = done.batches
    assert entries(batch) == [(request_id(0), 3, [42], 0)]


def test_output_that_is_repeated_is_split_where_a_message_would_be_too_long(
    replica: Replica, script: PlanScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's piece stays whole, in the order of the rows."""
    monkeypatch.setattr(replica_module, "MAX_BATCH_TOKENS", 7)
    known = (11, 12, 13, 14, 15, 30, 31)
    admits = [make_admit(slot, token_ids=known) for slot in range(3)]
    schedule = [(slot, 7) for slot in range(3)]
    done = step(replica, script.plan(admits=admits, schedule=schedule), 32, 32, 32)
    assert [to for to, _ in done.batches] == [GATEWAY_A, GATEWAY_A]
    assert [entries(batch) for _, batch in done.batches] == [
        [(request_id(0), 0, [30, 31, 32], 0), (request_id(1), 0, [30, 31, 32], 0)],
        [(request_id(2), 0, [30, 31, 32], 0)],
    ]


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason"),
    [
        (SamplingSpec(max_tokens=9, stop_token_ids=(7, 8)), [1, 2, 8], FinishReason.STOP),
        (SamplingSpec(max_tokens=9, stop_token_ids=(7,), min_tokens=2), [7, 7, 7],
         FinishReason.STOP),
        (SamplingSpec(max_tokens=3, stop_token_ids=(7,)), [1, 2, 3], FinishReason.LENGTH),
        (SamplingSpec(max_tokens=1), [1], FinishReason.LENGTH),
    ],
)  # fmt: skip
def test_a_row_ends_by_stop_token_or_length(
    replica: Replica,
    script: PlanScript,
    sampling: SamplingSpec,
    tokens: list[int],
    reason: FinishReason,
) -> None:
    plan = script.plan(admits=[make_admit(sampling=sampling)], schedule=[(0, 5)])
    for index, token in enumerate(tokens):
        done = step(replica, plan, token)
        ended = index == len(tokens) - 1
        assert done.finished_slots == ([0] if ended else [])
        ((_, batch),) = done.batches
        assert entries(batch) == [(request_id(0), index, [token], reason if ended else 0)]
        plan = script.plan(schedule=[(0, 1)] if index == 0 else [])
    assert done.finish_reasons == [reason]
    wasted = applied(replica, plan)
    assert (wasted.rows, wasted.num_wasted_rows) == ([], 1)
    assert replica.complete(StepOutput(token_ids=())).finished_slots == []
    assert replica.snapshot().recent_finishes[0].finish_reason is reason


def test_a_row_ends_at_the_longest_context(script: PlanScript) -> None:
    replica = Replica(dataclasses.replace(LIMITS, max_model_len=7))
    step(replica, script.plan(admits=[make_admit()], schedule=[(0, 5)]), 42)
    done = step(replica, script.plan(schedule=[(0, 1)]), 43)
    assert done.finish_reasons == [FinishReason.LENGTH]


def test_a_cancelled_row_is_wasted_until_it_is_released(
    replica: Replica, script: PlanScript
) -> None:
    plan = script.plan(admits=[make_admit(0), make_admit(1)], schedule=[(0, 5), (1, 5)])
    step(replica, plan, 42, 43)
    assert replica.cancel({request_id(0), request_id(77)}) == 1
    assert replica.num_live_rows == 1
    after = applied(replica, script.plan(schedule=[(0, 1), (1, 1)]))
    assert ([row.slot for row in after.rows], after.num_wasted_rows) == ([1], 1)
    done = replica.complete(StepOutput(token_ids=(44,)))
    assert (done.slots, done.finished_slots) == ([1], [0])
    assert done.finish_reasons == [FinishReason.CANCELLED]
    after = applied(replica, script.plan(releases=[0]))
    assert after.num_wasted_rows == 0


def test_early_cancels_are_kept_up_to_a_bound(replica: Replica, script: PlanScript) -> None:
    """At the bound the oldest is forgotten, and its request is computed."""
    replica.cancel({request_id(1)})
    replica.cancel({request_id(number) for number in range(2, MAX_EARLY_CANCELS + 1)})
    replica.cancel({request_id(2)})
    replica.cancel({request_id(MAX_EARLY_CANCELS + 1)})
    admits = [make_admit(slot, request_id=request_id(1 + slot)) for slot in range(2)]
    after = applied(replica, script.plan(admits=admits, schedule=[(0, 5), (1, 5)]))
    assert ([row.slot for row in after.rows], after.num_wasted_rows) == ([0], 1)
    assert [finish.request_id for finish in replica.snapshot().recent_finishes] == [request_id(2)]
    done = replica.complete(StepOutput(token_ids=(42,)))
    assert (done.finished_slots, done.finish_reasons) == ([1], [FinishReason.CANCELLED])


def test_a_failed_row_ends_alone(replica: Replica, script: PlanScript) -> None:
    admits = [make_admit(0), make_admit(1), make_admit(2)]
    applied(replica, script.plan(admits=admits, schedule=[(0, 5), (1, 2), (2, 5)]))
    output = StepOutput(token_ids=(None, 45), failures=((0, "bad row"), (1, "bad chunk")))
    done = replica.complete(output)
    assert (done.slots, done.token_ids) == ([2], [45])
    assert done.finished_slots == [0, 1]
    assert set(done.finish_reasons) == {FinishReason.ERROR}
    assert [(fault.slot, fault.message) for fault in done.faults] == [
        (0, "bad row"),
        (1, "bad chunk"),
    ]
    ((_, batch),) = done.batches
    assert entries(batch) == [
        (request_id(0), 0, [], FinishReason.ERROR),
        (request_id(1), 0, [], FinishReason.ERROR),
        (request_id(2), 0, [45], 0),
    ]


def test_a_failed_step_leaves_rows_as_before_it_and_awaits_a_reset(
    replica: Replica, script: PlanScript
) -> None:
    step(replica, script.plan(admits=[make_admit()], schedule=[(0, 5)]), 42)
    before = replica.snapshot()
    applied(replica, script.plan(schedule=[(0, 1)]))
    replica.fail_step()
    assert replica.snapshot() == before
    assert refused(replica, script.plan()).code is FaultCode.AWAITING_RESET
    plan = script.plan(reset=True, admits=[make_admit()], schedule=[(0, 5)])
    assert step(replica, plan, 42).token_ids == [42]


@pytest.mark.parametrize(
    "output",
    [
        StepOutput(token_ids=()),
        StepOutput(token_ids=(1, 2)),
        StepOutput(token_ids=(LIMITS.vocab_size,)),
        StepOutput(token_ids=(1,), failures=((1, "no such row"),)),
    ],
)
def test_output_that_does_not_fit_the_step_changes_nothing(
    replica: Replica, script: PlanScript, output: StepOutput
) -> None:
    applied(replica, script.plan(admits=[make_admit()], schedule=[(0, 5)]))
    before = replica.snapshot()
    with pytest.raises(RunnerOutputError):
        replica.complete(output)
    assert replica.snapshot() == before


def test_a_slot_can_be_released_and_used_again_in_one_plan(
    replica: Replica, script: PlanScript
) -> None:
    step(replica, script.plan(admits=[make_admit()], schedule=[(0, 5)]), 42)
    again = make_admit(generation=2, request_id=request_id(9), block_ids=(1, 7))
    after = applied(replica, script.plan(releases=[0], admits=[again], schedule=[(0, 5)]))
    assert [list(row.block_ids) for row in after.rows] == [[1, 7]]


def test_a_released_row_leaves_the_schedule(replica: Replica, script: PlanScript) -> None:
    step(replica, script.plan(admits=[make_admit()], schedule=[(0, 5)]), 42)
    step(replica, script.plan(releases=[0]))
    plan = script.plan(admits=[make_admit(generation=2)])
    assert applied(replica, plan).rows == []


def test_growth_lengthens_the_table_before_the_rows_are_checked(
    replica: Replica, script: PlanScript
) -> None:
    admit = make_admit(block_ids=(0,))
    step(replica, script.plan(admits=[admit], schedule=[(0, 4)]))
    after = applied(replica, script.plan(growth=[(0, 9)], schedule=[(0, 1)]))
    assert list(after.rows[0].block_ids) == [0, 9]


def test_the_first_plan_of_an_epoch_must_reset(replica: Replica, script: PlanScript) -> None:
    assert refused(replica, script.plan(reset=False)).code is FaultCode.AWAITING_RESET
    step(replica, script.plan(reset=True, admits=[make_admit()], schedule=[(0, 5)]), 42)
    newer = PlanScript(epoch=2)
    newer.tables = dict(script.tables)
    assert refused(replica, newer.plan(reset=False)).code is FaultCode.AWAITING_RESET
    step(replica, newer.plan(reset=True))
    assert (replica.digest, replica.num_live_rows) == (0, 0)


def test_generations_start_anew_with_a_reset(replica: Replica, script: PlanScript) -> None:
    step(replica, script.plan(admits=[make_admit(generation=5)], schedule=[(0, 5)]), 42)
    applied(replica, script.plan(reset=True, admits=[make_admit(generation=1)]))


def test_a_digest_mismatch_is_refused_until_a_reset(replica: Replica, script: PlanScript) -> None:
    step(replica, script.plan(admits=[make_admit()], schedule=[(0, 5)]), 42)
    before, digest = replica.snapshot(), replica.digest
    plan = script.plan(admits=[make_admit(1)])
    refusal = refused(replica, dataclasses.replace(plan, digest=plan.digest ^ 1))
    assert refusal.code is FaultCode.DIGEST_MISMATCH
    assert refusal.digest == plan.digest
    assert (replica.snapshot(), replica.digest) == (before, digest)
    assert refused(replica, script.plan()).code is FaultCode.AWAITING_RESET
    applied(replica, script.plan(reset=True))
    applied(replica, script.plan())


def test_swapped_blocks_change_the_digest(replica: Replica, script: PlanScript) -> None:
    plan = script.plan(admits=[make_admit(block_ids=(0, 1))])
    swapped = dataclasses.replace(plan, admits=(make_admit(block_ids=(1, 0)),))
    assert refused(replica, swapped).code is FaultCode.DIGEST_MISMATCH


Change = Callable[[StepPlan], StepPlan]


def admitting(**changes: object) -> Change:
    """Admission to slot 3 with something wrong in it."""

    def change(plan: StepPlan) -> StepPlan:
        good = {"slot": 3, "request_id": request_id(3), "block_ids": (20, 21)}
        return dataclasses.replace(plan, admits=(make_admit(**{**good, **changes}),))  # type: ignore[arg-type]

    return change


def columns(**changes: object) -> Change:
    return lambda plan: dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def sampling(**changes: object) -> Change:
    return admitting(sampling=dataclasses.replace(SamplingSpec(max_tokens=8), **changes))  # type: ignore[arg-type]


INVALID: dict[str, Change] = {
    "release of an unused slot": columns(release_slots=(5,)),
    "release of a slot outside the table": columns(release_slots=(LIMITS.num_slots,)),
    "a slot released twice": columns(release_slots=(0, 0)),
    "admission outside the table": admitting(slot=LIMITS.num_slots),
    "admission to a used slot": admitting(slot=0, generation=2),
    "two admissions to a slot": columns(
        admits=(make_admit(3, block_ids=(20,)), make_admit(3, block_ids=(21,), generation=2))
    ),
    "a generation again": lambda plan: dataclasses.replace(
        plan, release_slots=(0,), admits=(make_admit(0, generation=1),)
    ),
    "no tokens": admitting(token_ids=(), prompt_len=0),
    "a token outside the vocabulary": admitting(token_ids=(1, LIMITS.vocab_size), prompt_len=2),
    "a negative token": admitting(token_ids=(1, -1), prompt_len=2),
    "a request as long as the context": admitting(
        token_ids=(1,) * LIMITS.max_model_len, prompt_len=5
    ),
    "no prompt": admitting(prompt_len=0),
    "a prompt longer than the tokens": admitting(prompt_len=6),
    "all tokens computed": admitting(num_computed_tokens=5),
    "computed tokens without blocks": admitting(num_computed_tokens=4, block_ids=()),
    "emit_from behind the output": admitting(emit_from=1),
    "a block outside the cache": admitting(block_ids=(20, LIMITS.num_blocks)),
    "a negative block": admitting(block_ids=(20, -1)),
    "a block twice in a table": admitting(block_ids=(20, 20)),
    "a table longer than the context": admitting(block_ids=tuple(range(20, 31))),
    "a short request id": admitting(request_id=b"short"),
    "a short reply_to": admitting(reply_to=b""),
    "an unknown kind": admitting(generates=False),
    "no output wanted": sampling(max_tokens=0),
    "as much output as wanted": admitting(prompt_len=2, sampling=SamplingSpec(max_tokens=3)),
    "negative temperature": sampling(temperature=-1.0),
    "temperature that is no number": sampling(temperature=math.nan),
    "infinite temperature": sampling(temperature=math.inf),
    "top_p zero": sampling(top_p=0.0),
    "top_p above one": sampling(top_p=1.5),
    "min_p above one": sampling(min_p=1.5),
    "min_p that is no number": sampling(min_p=math.nan),
    "a presence penalty out of range": sampling(presence_penalty=-2.5),
    "a frequency penalty that is no number": sampling(frequency_penalty=math.nan),
    "a repetition penalty of zero": sampling(repetition_penalty=0.0),
    "an infinite repetition penalty": sampling(repetition_penalty=math.inf),
    "a bias out of range": sampling(logit_bias=((1, 101.0),)),
    "a bias that is no number": sampling(logit_bias=((1, math.nan),)),
    "a bias of no token": sampling(logit_bias=((-1, 1.0),)),
    "too many likely tokens": sampling(num_logprobs=21),
    "prompt logprobs without logprobs": sampling(prompt_logprobs=True),
    "a scored prompt with computed tokens": admitting(
        num_computed_tokens=1,
        sampling=SamplingSpec(max_tokens=8, num_logprobs=0, prompt_logprobs=True),
    ),
    "scored output with its logits in the cache": admitting(
        prompt_len=2, num_computed_tokens=2, sampling=SamplingSpec(max_tokens=8, num_logprobs=0)
    ),
    "growth of an unused slot": columns(grow_slots=(5,), grow_block_ids=(30,)),
    "growth with a block outside the cache": columns(grow_slots=(0,), grow_block_ids=(64,)),
    "growth with a negative block": columns(grow_slots=(0,), grow_block_ids=(-1,)),
    "growth with a block of the table": columns(grow_slots=(0,), grow_block_ids=(1,)),
    "the same growth twice": columns(grow_slots=(0, 0), grow_block_ids=(30, 30)),
    "growth beyond the context": columns(grow_slots=(0,) * 9, grow_block_ids=tuple(range(30, 39))),
    "growth columns of unequal length": columns(grow_slots=(0,), grow_block_ids=()),
    "changed columns of unequal length": columns(changed_slots=(0, 1), changed_num_tokens=(1,)),
    "a change of an unused slot": columns(changed_slots=(5,), changed_num_tokens=(1,)),
    "a slot changed twice": columns(changed_slots=(0, 0), changed_num_tokens=(1, 1)),
    "a negative number of tokens": columns(changed_slots=(0,), changed_num_tokens=(-1,)),
    "more tokens than are known": columns(changed_slots=(0,), changed_num_tokens=(2,)),
    "tokens that the table does not cover": lambda plan: columns(
        changed_slots=(3,), changed_num_tokens=(5,)
    )(admitting(block_ids=(20,))(plan)),
    "more tokens than a step may have": lambda plan: dataclasses.replace(
        plan,
        admits=tuple(
            make_admit(
                slot,
                token_ids=(1,) * 32,
                prompt_len=32,
                block_ids=tuple(range(8 * slot, 8 * slot + 8)),
            )
            for slot in (4, 5, 6)
        ),
        changed_slots=(4, 5, 6),
        changed_num_tokens=(32, 32, 32),
    ),
    "two rows that write to a block": lambda plan: columns(
        changed_slots=(0, 3), changed_num_tokens=(1, 5)
    )(admitting(block_ids=(20, 1))(plan)),
    "a plan of several steps": columns(num_steps=2),
}


def right_digest(script: PlanScript, plan: StepPlan) -> int:
    """The digest that belongs to a changed plan, so that it is not refused for that."""
    again = PlanScript()
    again.tables = {slot: (gen, list(blocks)) for slot, (gen, blocks) in script.tables.items()}
    return again.plan(
        reset=False,
        admits=plan.admits,
        releases=plan.release_slots,
        growth=list(zip(plan.grow_slots, plan.grow_block_ids, strict=False)),
    ).digest


@pytest.mark.parametrize("what", INVALID)
def test_an_invalid_plan_is_refused_without_change(
    replica: Replica, script: PlanScript, what: str
) -> None:
    step(replica, script.plan(admits=[make_admit(0), make_admit(1)], schedule=[(0, 5)]), 42)
    step(replica, script.plan(schedule=[(0, 0)]))
    before, digest = replica.snapshot(), replica.digest
    plan = INVALID[what](script.plan())
    refusal = refused(replica, dataclasses.replace(plan, digest=right_digest(script, plan)))
    assert refusal.code is FaultCode.INVALID_PLAN
    assert (replica.snapshot(), replica.digest) == (before, digest)
    assert refused(replica, script.plan()).code is FaultCode.AWAITING_RESET
    fresh = script.plan(reset=True, admits=[make_admit()], schedule=[(0, 5)])
    assert step(replica, fresh, 42).slots == [0]


def test_stop_tokens_outside_the_vocabulary_never_reach_the_sampler(
    replica: Replica, script: PlanScript
) -> None:
    spec = SamplingSpec(max_tokens=4, stop_token_ids=(7, LIMITS.vocab_size))
    plan = script.plan(admits=[make_admit(sampling=spec)], schedule=[(0, 5)])
    assert applied(replica, plan).rows[0].sampling.stop_token_ids == (7,)


def test_recent_finishes_are_bounded() -> None:
    replica, script = Replica(LIMITS), PlanScript()
    spec = SamplingSpec(max_tokens=1)
    for number in range(5000):
        releases = [0] if number else []
        admit = make_admit(generation=number + 1, request_id=request_id(number), sampling=spec)
        plan = script.plan(admits=[admit], releases=releases, schedule=[(0, 5)])
        replica.apply(plan)
        replica.complete(StepOutput(token_ids=(1,)))
    finishes = replica.snapshot().recent_finishes
    assert len(finishes) == 4096
    assert finishes[-1].request_id == request_id(4999)
