"""How far the simulator can be believed: what a trace says, the fit, the score, the page."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.client import Answer, read_answer
from benchmarks.simulation import belief_page, belief_predict, belief_trace
from benchmarks.simulation.belief import DOCS
from benchmarks.simulation.belief_predict import FIGURES, Fitted, Ways
from benchmarks.simulation.belief_trace import BeliefError, Request, Step
from benchmarks.simulation.belief_work import FIT, SCORE, halves
from benchmarks.workload import Job
from scheduler_svc import trace_file
from scheduler_svc.core import CoreConfig, SchedulerCore
from scheduler_svc.core.events import BecameLeader, Event, RequestArrived
from scheduler_svc.sim.arrivals import Arrival, Source
from scheduler_svc.sim.cost import StepCost, kv_tokens
from scheduler_svc.sim.cost_fit import Fit
from scheduler_svc.trace_file import Trace
from tests.builders import FakeWorker, make_request, make_worker

MS = 1_000_000
COST = StepCost(fixed_s=0.01, decode_token_s=0.001, prefill_token_s=0.002, kv_token_s=1e-5)
NO_WAYS = Ways(request_s=(0.0,), token_s=(0.0,), round_trip_s=(0.0,))


def record(requests: Sequence[RequestArrived], *, num_workers: int = 1) -> Trace:
    """A core's term with one worker that takes a plan every 10 ms, recorded as the service does."""
    config = CoreConfig(max_inflight_steps=2)
    core = SchedulerCore(config)
    joined = [make_worker(f"w{i}", max_num_batched_tokens=16) for i in range(num_workers)]
    worker = FakeWorker(joined[0])
    lines = [trace_file.FIRST_LINE, trace_file.config_line(config)]
    fed: list[Event] = [BecameLeader(now_ns=0, epoch=1), *joined, *requests]
    now_ns = 0
    while fed:
        lines += trace_file.event_lines(fed)
        for event in fed:
            core.feed(event)
        ready = core.take_ready()
        lines += [*trace_file.answer_lines(ready), "."]
        for plan in ready.plans:
            if plan.worker_id == worker.worker_id:
                worker.take(plan)
        now_ns += 10 * MS
        fed = [worker.next_result(now_ns=now_ns)] if worker.plans else []
    return trace_file.read(f"{line}\n" for line in lines)


def test_rows_of_a_trace_are_counted_as_the_cost_counts_them() -> None:
    """A prompt of 20 in chunks of 16 and 4, then two decodes: 20 + 2 tokens, 3 samples."""
    request = make_request("a", prompt=20, max_tokens=3)
    found = belief_trace.read(record([request]))
    counts = [
        (step.num_prefill_tokens, step.num_decode_tokens, step.kv_tokens_read)
        for step in found.steps
        if step.kv_tokens_read
    ]
    assert counts == [
        (16, 0, kv_tokens(0, 16)),
        (4, 0, kv_tokens(16, 4)),
        (0, 1, kv_tokens(20, 1)),
        (0, 1, kv_tokens(21, 1)),
    ]
    first, second = (step for step in found.steps if step.num_prefill_tokens)
    assert (first.planned_s, first.returned_s, first.follows) == (0.0, 0.01, False)
    assert (second.planned_s, second.returned_s, second.follows) == (0.0, 0.02, True)
    assert found.requests == (
        Request(prompt=request.prompt_token_ids, arrived_s=0.0, first_token_s=0.02),
    )
    assert found.worker.capacity.max_num_batched_tokens == 16


def test_rows_that_have_ended_cost_nothing() -> None:
    """A stop that the planner does not know leaves rows of it in plans that are out."""
    found = belief_trace.read(record([make_request("a", prompt=4, max_tokens=9, stop_after=2)]))
    counts = [(step.num_prefill_tokens, step.num_decode_tokens) for step in found.steps]
    assert [of for of in counts if any(of)] == [(4, 0), (0, 1)]
    # The last one is of a row that had ended.
    assert counts[-1] == (0, 0)


def test_a_trace_that_is_no_single_worker_s_is_refused() -> None:
    with pytest.raises(BeliefError, match="more than one worker"):
        belief_trace.read(record([], num_workers=2))
    with pytest.raises(BeliefError, match="no worker"):
        belief_trace.read(Trace(config=CoreConfig(), rounds=(), stopped=None))


def step(num_decodes: int, num_prompt: int, num_kv: int, at_s: float, **more: Any) -> Step:
    """A step that took what COST says, 1 ms of it between it and the one before."""
    seconds = COST.seconds(num_decodes, num_prompt, num_kv, 0)
    fields: dict[str, Any] = {
        "planned_s": at_s - 0.004,
        "returned_s": at_s + seconds,
        "step_s": seconds - 0.001,
        "total_s": seconds,
        "follows": True,
        "num_decode_tokens": num_decodes,
        "num_prefill_tokens": num_prompt,
        "kv_tokens_read": num_kv,
        "copied_bytes": 0,
    }
    return Step(**(fields | more))


def steps() -> Iterator[Step]:
    """One after the other, of many kinds, without scatter."""
    at_s = 1.0
    for number in range(60):
        of = step(number % 7, 16 * (number % 5), 100 * (number % 11) + 50, at_s)
        yield of
        at_s = of.returned_s


def test_the_fit_finds_the_cost_and_what_lies_between_steps() -> None:
    seen = list(steps())
    fitted = belief_predict.fit(seen, NO_WAYS)
    assert fitted.between_s == pytest.approx(0.001)
    for part in ("fixed_s", "decode_token_s", "prefill_token_s", "kv_token_s"):
        assert getattr(fitted.fit.cost, part) == pytest.approx(getattr(COST, part), rel=1e-6)
    assert [of[0] for of in fitted.steps_s] == pytest.approx([of[1] for of in fitted.steps_s])
    slow = [step(1, 0, 500, 0.0, step_s=1.2 * COST.seconds(1, 0, 500, 0) - 0.001)]
    assert belief_predict.step_time(fitted, slow) == pytest.approx(1.2)
    told = belief_predict.told(fitted, slow, NO_WAYS)
    assert [after / before for before, after in told.steps_s] == pytest.approx([1.2])
    assert told.fit == fitted.fit
    assert seen[3].round_trip_s == pytest.approx(0.004)
    with pytest.raises(BeliefError, match="no step followed"):
        belief_predict.between_s([step(1, 0, 1, 0.0, follows=False)] * 2)


def answer(began_s: float, *times_s: float) -> Answer:
    """Tokens at these times."""
    return Answer(started_s=began_s, ended_s=began_s + 1, token_times_s=times_s)


def test_answers_find_their_requests_by_prompt_and_equal_ones_in_order() -> None:
    first, second = (Request(prompt=(1, 2), arrived_s=at, first_token_s=at + 1) for at in (5, 6))
    other = Request(prompt=(3,), arrived_s=5.5, first_token_s=7.0)
    work = [Job(prompt=prompt, num_output=1) for prompt in ((1, 2), (3,), (1, 2))]
    answers = [answer(4.9, 6.5), answer(5.4, 7.5), answer(5.9, 7.5)]
    pairs = belief_predict.matched(work, answers, [first, other, second])
    assert pairs == list(zip(answers, (first, other, second), strict=True))
    ways = belief_predict.ways(pairs, [step(1, 0, 1, 0.0)])
    assert ways.request_s == pytest.approx((0.1, 0.1, 0.1))
    assert ways.token_s == pytest.approx((0.5, 0.5, 0.5))
    with pytest.raises(BeliefError, match="missing"):
        belief_predict.matched(work, answers, [first, other])


def test_a_prediction_is_the_cost_and_the_ways() -> None:
    """One request alone: its prompt, then each decode with one more token of context."""
    fit = Fit(cost=COST, num_observations=1, residual_rms=0.0, residual_max=0.0)
    ways = Ways(request_s=(0.1,), token_s=(0.2,), round_trip_s=(0.004,))
    fitted = Fitted(fit=fit, steps_s=(), between_s=0.0, ways=ways)
    cluster = belief_predict.cluster(make_worker(), CoreConfig(max_inflight_steps=2), fitted)
    source = Source(
        name="one",
        prefix_block_tokens=16,
        passes=lambda: iter([Arrival(at=1.0, num_prompt_tokens=10, num_output_tokens=3)]),
    )
    found = belief_predict.predict(cluster, ways, source)
    prompt_s, first_s, second_s = (
        COST.seconds(0, 10, kv_tokens(0, 10), 0),
        COST.seconds(1, 0, 11, 0),
        COST.seconds(1, 0, 12, 0),
    )
    assert found["ttft_p50_ms"] == pytest.approx(1e3 * (0.1 + 0.004 + prompt_s + 0.2))
    assert found["gap_p50_ms"] == pytest.approx(1e3 * (first_s + second_s) / 2)
    assert found["gap_p99_ms"] == pytest.approx(1e3 * second_s, rel=1e-3)


def test_measured_figures_are_of_tokens() -> None:
    found = belief_predict.measured([answer(0.0, 0.1, 0.2, 0.4), answer(1.0, 1.3)])
    assert found["ttft_p50_ms"] == pytest.approx(200)
    assert found["gap_p50_ms"] == pytest.approx(150)
    assert found["gap_p99_ms"] == pytest.approx(199)
    assert list(found) == list(FIGURES)


def test_the_client_notes_when_each_token_came() -> None:
    """Also those that have no text yet, and two in a piece."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    events = [b'{"choices":[{"text":"","token_ids":[5]}]}']
    events.append(b'{"choices":[{"text":"ab","token_ids":[6,7]}]}')
    pieces = [(float(at), b"data: %b\n\n" % event) for at, event in enumerate(events, start=1)]
    chunked = b"transfer-encoding: chunked\r\n"
    body = [(at, b"%x\r\n%b\r\n" % (len(data), data)) for at, data in pieces]
    whole = [(0.5, head[:-2] + chunked + b"\r\n"), *body, (3.0, b"0\r\n\r\n")]
    found = read_answer(whole, 0.0, "")
    assert found.token_times_s == (1.0, 2.0, 2.0)
    assert found.text_times_s == (2.0,)


def test_halves_share_a_kind_and_no_token_block() -> None:
    every = halves(1, 20.0)
    assert [half.role for half in every] == [FIT, SCORE] * 5
    seen: set[tuple[int, ...]] = set()
    for half in every:
        work, arrivals = half.jobs(), list(half.source())
        sizes = [(of.num_prompt_tokens, of.num_output_tokens) for of in arrivals]
        assert [(len(job.prompt), job.num_output) for job in work] == sizes
        assert all(of.at < 20.0 and not of.tenant and not of.priority for of in arrivals)
        blocks = {job.prompt[at : at + 16] for job in work for at in range(0, len(job.prompt), 16)}
        whole = {block for block in blocks if len(block) == 16}
        assert not whole & seen
        seen |= whole
    agents = every[-1].jobs()
    assert len({job.prompt[:16] for job in agents}) < len(agents)


def document(**more: Any) -> dict[str, Any]:
    """A run's outcome with two rows."""
    measured = dict.fromkeys(FIGURES, 100.0)
    rows = [
        {"workload": "chat", "half": FIT, "requests": 9, "steps": 5, "step_time": 1.0,
         "measured": measured, "predicted": dict.fromkeys(FIGURES, 101.0), "told": measured},
        {"workload": "chat", "half": SCORE, "requests": 8, "steps": 5, "step_time": 1.04,
         "measured": measured,
         "predicted": dict(zip(FIGURES, (110.0, 90.0, 100.0, 80.0), strict=True)),
         "told": dict.fromkeys(FIGURES, 95.0)},
    ]  # fmt: skip
    fit = {"cost": "COST", "between_ms": 0.2, "request_ms": 3.0, "token_ms": 2.0}
    machine = {"commit": "abc", "cores": 2, "cpu": "X"}
    return {
        "command": "c", "quick": False, "date": "D", "took_s": 1.0, "load_before": 7.5,
        "load_after": 8.5, "machine": machine, "replayed_rounds": 5, "rows": rows,
        "fit": fit | {"round_trip_ms": 4.0}, **more,
    }  # fmt: skip


def test_the_score_is_of_the_scored_halves_alone() -> None:
    rows = document()["rows"]
    scored, fitted = (belief_page.of_role(rows, role) for role in (SCORE, FIT))
    assert belief_page.errors(scored) == pytest.approx([0.1, -0.1, 0.0, -0.2])
    assert belief_page.mean_error(scored) == pytest.approx(0.1)
    assert belief_page.mean_error(scored, "told") == pytest.approx(0.05)
    assert belief_page.mean_error(fitted) == pytest.approx(0.01)
    text = belief_page.section(document())
    assert "of the 4 scored figures: 10.0%**, beyond the 9% aimed at" in text
    assert "the largest -20%. Of the fitted halves: 1.0%." in text
    assert "load average 7.5 before and 8.5 after it" in text
    assert "A quick run" in belief_page.section(document(quick=True))
    first, second = belief_page.table(rows).splitlines()[2:]
    assert first.startswith("| chat     | scored | 8        | 110 / 100 (+10%)")
    assert "| fitted |" in second


def test_the_page_says_what_its_json_says() -> None:
    found = belief_page.find_section((DOCS / belief_page.PAGE).read_text())
    json_path = DOCS / belief_page.JSON
    if not json_path.exists():
        assert found == belief_page.NOT_YET
        return
    assert found == belief_page.section(json.loads(json_path.read_text()))


def test_a_run_replaces_its_part_of_a_page_and_no_other(tmp_path: Path) -> None:
    page = tmp_path / belief_page.PAGE
    assert belief_page.write(tmp_path, document(), "text") == [tmp_path / belief_page.JSON]
    assert not page.exists()
    page.write_text(f"before\n{belief_page.BEGIN}\nold\n{belief_page.END}\nbehind\n")
    assert belief_page.write(tmp_path, document(), "new")[1] == page
    assert page.read_text() == (f"before\n{belief_page.BEGIN}\nnew\n{belief_page.END}\nbehind\n")
    assert json.loads((tmp_path / belief_page.JSON).read_text()) == document()
    with pytest.raises(ValueError, match="no marks"):
        belief_page.with_section("nothing", "text")
