"""Logprobs in the replica: scored where computed, sent with their tokens, never twice."""

import dataclasses
from array import array

import pytest

from gpu_worker import replica as replica_module
from gpu_worker.messages import FinishReason, StepPlan, TokenBatch, TokenLogprobs
from gpu_worker.ports import LogprobRows, SamplingSpec, StepOutput
from gpu_worker.replica import AppliedPlan, CompletedStep, Replica, RunnerOutputError
from tests.stub_worker.fake_runner import fake_logprobs
from tests.worker_builders import GATEWAY_B, LIMITS, PlanScript, make_admit, request_id

OUTPUT = SamplingSpec(max_tokens=8, num_logprobs=2)
PROMPT = SamplingSpec(max_tokens=8, num_logprobs=1, prompt_logprobs=True)


@pytest.fixture
def replica() -> Replica:
    return Replica(LIMITS)


@pytest.fixture
def script() -> PlanScript:
    return PlanScript()


def applied(replica: Replica, plan: StepPlan) -> AppliedPlan:
    result = replica.apply(plan)
    assert isinstance(result, AppliedPlan), result
    return result


def computed(
    replica: Replica, plan: StepPlan, *tokens: int | None, failed: tuple[int, ...] = ()
) -> tuple[list[list[int]], CompletedStep]:
    """The tokens that each row had scored, and what became of the step."""
    rows = applied(replica, plan).rows
    sampled = iter(tokens)
    logprobs = []
    for index, row in enumerate(rows):
        token = next(sampled) if row.samples else None
        scored = [*row.scored_token_ids, *(() if token is None else (token,))]
        if row.sampling.num_logprobs is not None and index not in failed:
            logprobs.append((index, fake_logprobs(scored, row.sampling.num_logprobs, 100)))
    done = replica.complete(
        StepOutput(
            token_ids=tokens,
            failures=tuple((index, "bad") for index in failed),
            logprobs=tuple(logprobs),
        )
    )
    return [list(row.scored_token_ids) for row in rows], done


Entry = tuple[int, list[int], int, list[int] | None]


def entries(batch: TokenBatch) -> list[Entry]:
    """(first position, tokens, prompt rows, own token of each row by its likeliest) per entry."""
    scored = {entry.entry: entry for entry in batch.logprobs}
    found: list[Entry] = []
    at = 0
    for index, count in enumerate(batch.num_tokens):
        tokens = list(batch.token_ids[at : at + count])
        at += count
        entry = scored.get(index)
        owns = None if entry is None else list(entry.top_token_ids[:: entry.num_top])
        num_prompt = 0 if entry is None else entry.num_prompt_rows
        found.append((batch.first_positions[index], tokens, num_prompt, owns))
    return found


def sent(done: CompletedStep) -> list[Entry]:
    """Entries of the only batch."""
    ((_, batch),) = done.batches
    return entries(batch)


def test_a_prompt_is_scored_in_chunks_and_goes_out_with_the_first_token(
    replica: Replica, script: PlanScript
) -> None:
    admit = make_admit(sampling=PROMPT)
    scored, done = computed(replica, script.plan(admits=[admit], schedule=[(0, 2)]))
    assert (scored, done.batches) == ([[12, 13]], [])
    scored, done = computed(replica, script.plan(schedule=[(0, 3)]), 42)
    assert scored == [[14, 15]]
    assert sent(done) == [(0, [42], 4, [12, 13, 14, 15, 42])]
    scored, done = computed(replica, script.plan(schedule=[(0, 1)]), 43)
    assert (scored, sent(done)) == ([[]], [(1, [43], 0, [43])])


def test_output_alone_is_scored_where_it_begins(replica: Replica, script: PlanScript) -> None:
    plan = script.plan(admits=[make_admit(sampling=OUTPUT)], schedule=[(0, 3)])
    assert computed(replica, plan)[0] == [[]]
    scored, done = computed(replica, script.plan(schedule=[(0, 2)]), 42)
    assert (scored, sent(done)) == ([[]], [(0, [42], 0, [42])])
    ((_, batch),) = done.batches
    assert batch.logprobs == [
        TokenLogprobs(
            entry=0,
            num_prompt_rows=0,
            num_top=2,
            logprobs=array("f", [-0.5]),
            top_token_ids=array("i", [42, 43]),
            top_logprobs=array("f", [-0.5, -1.5]),
        )
    ]


@pytest.mark.parametrize(
    ("spec", "emit_from", "first", "second"),
    [
        (OUTPUT, 0, [13, 14], [15]),
        (OUTPUT, 1, [14], [15]),
        (OUTPUT, 3, [], []),
        (PROMPT, 0, [12, 13, 14], [15]),
        (PROMPT, 2, [], [15]),
    ],
)
def test_known_output_goes_out_as_its_logprobs_come(
    replica: Replica,
    script: PlanScript,
    spec: SamplingSpec,
    emit_from: int,
    first: list[int],
    second: list[int],
) -> None:
    """Prompt 11, 12; output 13, 14, 15 is known at the admission."""
    admit = make_admit(prompt_len=2, emit_from=emit_from, sampling=spec)
    scored, done = computed(replica, script.plan(admits=[admit], schedule=[(0, 3)]))
    assert scored == [first]
    num_prompt = 1 if 12 in first else 0
    if first:
        assert sent(done) == [(emit_from, first[num_prompt:], num_prompt, first)]
    else:
        assert done.batches == []
    scored, done = computed(replica, script.plan(schedule=[(0, 2)]), 42)
    assert scored == [second]
    given = emit_from + len(first) - num_prompt
    assert sent(done) == [(given, [*second, 42], 0, [*second, 42])]


def test_a_row_that_is_admitted_again_begins_anew(replica: Replica, script: PlanScript) -> None:
    admit = make_admit(sampling=PROMPT)
    computed(replica, script.plan(admits=[admit], schedule=[(0, 4)]))
    again = make_admit(sampling=PROMPT, generation=2)
    plan = script.plan(releases=[0], admits=[again], schedule=[(0, 5)])
    scored, done = computed(replica, plan, 42)
    assert scored == [[12, 13, 14, 15]]
    assert sent(done) == [(0, [42], 4, [12, 13, 14, 15, 42])]


def test_a_failed_step_adds_nothing(replica: Replica, script: PlanScript) -> None:
    computed(replica, script.plan(admits=[make_admit(sampling=PROMPT)], schedule=[(0, 2)]))
    applied(replica, script.plan())
    replica.fail_step()
    plan = script.plan(reset=True, admits=[make_admit(sampling=PROMPT)], schedule=[(0, 5)])
    assert sent(computed(replica, plan, 42)[1]) == [(0, [42], 4, [12, 13, 14, 15, 42])]


def test_rows_with_and_without_logprobs_share_a_batch(replica: Replica, script: PlanScript) -> None:
    admits = [make_admit(0), make_admit(1, sampling=OUTPUT), make_admit(2, sampling=PROMPT)]
    plan = script.plan(admits=admits, schedule=[(0, 5), (1, 5), (2, 4)])
    scored, done = computed(replica, plan, 20, 21)
    assert scored == [[], [], [12, 13, 14, 15]]
    assert sent(done) == [(0, [20], 0, None), (0, [21], 0, [21])]


def test_a_row_that_fails_sends_its_end_without_logprobs(
    replica: Replica, script: PlanScript
) -> None:
    admit = make_admit(prompt_len=2, sampling=PROMPT)
    computed(replica, script.plan(admits=[admit], schedule=[(0, 1)]))
    _, done = computed(replica, script.plan(schedule=[(0, 4)]), None, failed=(0,))
    assert done.finish_reasons == [FinishReason.ERROR]
    assert sent(done) == [(0, [], 0, None)]


def test_the_last_token_comes_with_its_logprob(replica: Replica, script: PlanScript) -> None:
    spec = dataclasses.replace(OUTPUT, max_tokens=1)
    plan = script.plan(admits=[make_admit(sampling=spec)], schedule=[(0, 5)])
    _, done = computed(replica, plan, 42)
    ((_, batch),) = done.batches
    assert list(batch.finish_reasons) == [FinishReason.LENGTH]
    assert entries(batch) == [(0, [42], 0, [42])]


def test_batches_are_split_where_a_message_would_be_too_large(
    replica: Replica, script: PlanScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve values a batch: three prompts of five rows of two do not fit one."""
    monkeypatch.setattr(replica_module, "MAX_BATCH_LOGPROBS", 12)
    admits = [
        make_admit(0, sampling=PROMPT),
        make_admit(1),
        make_admit(2, sampling=PROMPT),
        make_admit(3, sampling=PROMPT, reply_to=GATEWAY_B),
    ]
    plan = script.plan(admits=admits, schedule=[(slot, 5) for slot in range(4)])
    _, done = computed(replica, plan, 20, 21, 22, 23)
    of_a = [batch for reply_to, batch in done.batches if reply_to != GATEWAY_B]
    assert len(done.batches) == 3
    assert [list(batch.request_ids) for batch in of_a] == [
        [request_id(0), request_id(1)],
        [request_id(2)],
    ]
    for _, batch in done.batches:
        assert sum(entry.num_values for entry in batch.logprobs) <= 12


def test_much_known_output_is_sent_in_pieces_of_which_the_last_one_ends(
    replica: Replica, script: PlanScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "MAX_BATCH_LOGPROBS", 7)
    spec = SamplingSpec(max_tokens=4, num_logprobs=2)
    plan = script.plan(admits=[make_admit(prompt_len=2, sampling=spec)], schedule=[(0, 5)])
    _, done = computed(replica, plan, 42)
    batches = [batch for _, batch in done.batches]
    assert [entries(batch) for batch in batches] == [
        [(0, [13, 14], 0, [13, 14])],
        [(2, [15, 42], 0, [15, 42])],
    ]
    assert [list(b.finish_reasons) for b in batches] == [[0], [FinishReason.LENGTH]]


def rows_of(count: int, num_top: int = 2) -> LogprobRows:
    return fake_logprobs([1] * count, num_top, 100)


@pytest.mark.parametrize(
    "given",
    [
        (),
        ((0, rows_of(0)),),
        ((0, rows_of(2)),),
        ((0, rows_of(1, num_top=3)),),
        ((0, dataclasses.replace(rows_of(1), top_logprobs=array("f", [1.0]))),),
    ],
)
def test_logprobs_that_do_not_fit_the_step_change_nothing(
    replica: Replica, script: PlanScript, given: tuple[tuple[int, LogprobRows], ...]
) -> None:
    applied(replica, script.plan(admits=[make_admit(sampling=OUTPUT)], schedule=[(0, 5)]))
    before = replica.snapshot()
    with pytest.raises(RunnerOutputError, match="logprobs"):
        replica.complete(StepOutput(token_ids=(42,), logprobs=given))
    assert replica.snapshot() == before


def test_penalties_see_prompt_and_output(replica: Replica, script: PlanScript) -> None:
    spec = SamplingSpec(max_tokens=8, presence_penalty=0.5)
    admits = [make_admit(0, sampling=spec), make_admit(1)]
    plan = script.plan(admits=admits, schedule=[(0, 5), (1, 5)])
    penalized, plain = applied(replica, plan).rows
    assert list(penalized.history or ()) == [11, 12, 13, 14, 15]
    assert plain.history is None
    replica.complete(StepOutput(token_ids=(42, 43)))
    penalized, _ = applied(replica, script.plan(schedule=[(0, 1), (1, 1)])).rows
    assert (list(penalized.history or ()), penalized.output_position) == (
        [11, 12, 13, 14, 15, 42],
        1,
    )


def test_a_bias_of_unknown_tokens_never_reaches_the_sampler(
    replica: Replica, script: PlanScript
) -> None:
    spec = SamplingSpec(max_tokens=4, logit_bias=((99, 1.0), (LIMITS.vocab_size, 2.0)))
    plan = script.plan(admits=[make_admit(sampling=spec)], schedule=[(0, 5)])
    assert applied(replica, plan).rows[0].sampling.logit_bias == ((99, 1.0),)
