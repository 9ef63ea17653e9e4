"""Loads: every request gets its tokens, whatever the cluster; the same figures for a seed."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType

import pytest

from scheduler_svc.core import CoreConfig, Ready, SchedulerCore
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.events import BecameLeader
from scheduler_svc.core.invariants import check_all
from scheduler_svc.core.tenants import Tenant
from scheduler_svc.core.types import WorkerId
from scheduler_svc.core.worker_state import WorkerState
from scheduler_svc.sim import fairness, load, report
from scheduler_svc.sim.arrivals import ArrivalError, Source, Traffic, generate, open_source
from scheduler_svc.sim.load import Cluster, repeated, run_load
from scheduler_svc.sim.runlog import Phase, RunLog
from scheduler_svc.sim.scatter import Scatter
from tests.builders import make_request, make_worker

pytestmark = pytest.mark.slow
SMALL = Cluster(num_workers=2, num_slots=16, num_blocks=400, max_model_len=4096)


def chat(count: int = 150, rate_per_s: float = 40.0) -> Source:
    """Short prompts."""
    return generate("chat", Traffic(seed=7, count=count, rate_per_s=rate_per_s, scale=0.2))


def check_whole(log: RunLog, source: Source) -> None:
    """Each request has its tokens, in its time, in phases that follow each other."""
    for of, arrival in zip(log.requests, source, strict=True):
        assert of.num_output_tokens == arrival.num_output_tokens
        assert of.num_prompt_tokens == arrival.num_prompt_tokens
        assert of.first_token_s is not None
        assert of.finished_s is not None
        assert arrival.at <= of.arrived_s < of.first_token_s <= of.finished_s <= log.duration_s
        assert of.finish_reason == "STOP"
        for before, after in zip(of.spans, of.spans[1:], strict=False):
            assert before.end_s == after.begin_s
    total = sum(of.num_output_tokens for of in log.requests)
    assert log.token_gaps.num == total - len(log.requests)


def test_every_request_gets_its_tokens() -> None:
    """On two workers with enough blocks."""
    log = run_load(SMALL, chat())
    check_whole(log, chat())
    assert {of.worker for of in log.requests} == {"worker-0", "worker-1"}
    phases = [span.phase for of in log.requests for span in of.spans]
    assert {Phase.PREFILL, Phase.DECODE} <= {*phases}


def test_figures_are_the_same_each_time() -> None:
    """But for the real clock's."""
    one, other = (report.summarize(run_load(SMALL, chat())) for _ in range(2))
    one, other = (replace(of, core_cpu_s=0.0, plans_per_core_s=0.0) for of in (one, other))
    assert one == other


def test_scatter_moves_times_and_no_tokens() -> None:
    """Steps twice as long, and ways between 0 and 50 ms that overtake nobody."""
    usual = run_load(SMALL, chat())
    scatter = Scatter(steps_s=((1.0, 2.0),), round_trips_s=(0.0, 0.05, 0.1))
    log = run_load(replace(SMALL, scatter=scatter), chat())
    check_whole(log, chat())
    shortest_s = min(step.duration_s for step in usual.steps if step.num_decode_rows == 1)
    alone_s = min(step.duration_s for step in log.steps if step.num_decode_rows == 1)
    assert alone_s == pytest.approx(2 * shortest_s, rel=0.01)


def test_where_lengths_are_known_nothing_is_planned_behind_them() -> None:
    """Else the core asks for a row more, where it runs ahead of the results."""
    ahead = replace(SMALL, config=CoreConfig(max_inflight_steps=4))
    rows = []
    for known in (False, True):
        log = run_load(replace(ahead, known_lengths=known), chat(30))
        check_whole(log, chat(30))
        rows.append(log.num_steps)
    assert rows[1] < rows[0]


@pytest.mark.parametrize(("mode", "phase"), [("swap", Phase.SWAPPED), ("recompute", None)])
def test_where_blocks_are_short(mode: str, phase: Phase | None) -> None:
    """Requests are preempted, and get what they asked for."""
    cluster = replace(
        SMALL,
        num_workers=1,
        num_blocks=40,
        num_host_blocks=400,
        config=CoreConfig(preemption_mode=mode, watermark=0.0),
    )
    source = chat(rate_per_s=400.0)
    log = run_load(cluster, source)
    check_whole(log, source)
    assert log.preemptions[mode] > 0
    phases = {span.phase for of in log.requests for span in of.spans}
    assert (phase or Phase.PREEMPTED) in phases


def test_more_than_may_wait_wait_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """And come in as others are admitted."""
    waiting: list[int] = []

    class Watched(SchedulerCore):
        def take_ready(self) -> Ready:
            waiting.append(self.view().num_waiting)
            return super().take_ready()

    monkeypatch.setattr("scheduler_svc.sim.load.MAX_WAITING", 8)
    monkeypatch.setattr("scheduler_svc.sim.load.SchedulerCore", Watched)
    source = chat(rate_per_s=1000.0)
    check_whole(run_load(SMALL, source), source)
    assert max(waiting) == 8


def test_fair_shares_hold_their_bound() -> None:
    """Four tenants that ask for more than one worker gives."""
    cluster = replace(SMALL, num_workers=1, config=CoreConfig(scheduling_policy="fair"))
    log = run_load(cluster, chat(rate_per_s=400.0))
    limits = fairness.Limits(max_model_len=cluster.max_model_len, num_slots=cluster.num_slots)
    shares = report.summarize(log, limits).fairness
    assert shares.num_tenants == 4
    assert shares.bound is not None
    assert shares.largest_lead <= shares.bound


def test_the_bound_of_fair_is_held_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each end while few have ended, then at one in a hundred; and a wrong charge breaks it."""
    cluster = replace(SMALL, num_workers=1, config=CoreConfig(scheduling_policy="fair"))
    num_looks = run_load(cluster, chat(rate_per_s=400.0)).num_fairness_looks
    assert num_looks > 50
    monkeypatch.setattr(fairness, "WATCH_ALL", 0)
    assert 0 < run_load(cluster, chat(rate_per_s=400.0)).num_fairness_looks < num_looks / 20
    monkeypatch.undo()
    charge = Tenant.charge

    def too_much(self: Tenant, num_tokens: int) -> None:
        charge(self, num_tokens * (1000 if self.name == "tenant-0" else 1))

    monkeypatch.setattr(Tenant, "charge", too_much)
    with pytest.raises(AssertionError, match="tenant-0 has had"):
        run_load(cluster, chat(rate_per_s=400.0))


def test_the_figures_of_one_worker_do_not_cost_a_look_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step's figures look at its own worker; a check looks into one worker, in turn."""
    calls: Counter[CodeType] = Counter()
    checked: list[WorkerId | None] = []

    def tally(frame: FrameType, what: str, arg: object) -> None:
        if what == "call":
            calls[frame.f_code] += 1

    def check(core: SchedulerCore, worker_id: WorkerId | None = None) -> None:
        checked.append(worker_id)
        check_all(core, worker_id)

    monkeypatch.setattr(load, "CHECK_EVERY", 10)
    monkeypatch.setattr(load, "check_all", check)
    cluster = replace(SMALL, num_workers=8)
    sys.setprofile(tally)
    try:
        log = run_load(cluster, chat(20))
    finally:
        sys.setprofile(None)
    assert calls[SchedulerCore.view.__code__] == 0
    assert calls[WorkerState.view.__code__] == log.num_steps > 100
    num_rounds = calls[SchedulerCore.take_ready.__code__]
    assert calls[BlockPool.check.__code__] == num_rounds // 10 + 8
    assert [*map(str, checked[:9])] == [f"worker-{i % 8}" for i in range(9)]
    assert checked[-1] is None


def test_a_glance_says_what_the_view_says() -> None:
    """Of one worker, and of all that wait."""
    core = SchedulerCore(CoreConfig(max_inflight_steps=4))
    core.feed(BecameLeader(now_ns=0, epoch=1))
    for name in ("w0", "w1"):
        core.feed(make_worker(name, num_slots=2))
    core.take_ready()
    for number in range(9):
        core.feed(make_request(f"r{number}"))
        if number == 0:
            core.take_ready()
    for num_waiting in (8, 6):
        view = core.view()
        assert view.num_waiting == num_waiting
        for worker in view.workers:
            seen = core.glance(worker.worker_id)
            assert (seen.num_waiting, seen.worker) == (num_waiting, worker)
        core.take_ready()


def test_a_file_begins_anew_at_its_end() -> None:
    """In order of time."""
    times = [arrival.at for arrival in repeated(chat(10), 25)]
    assert len(times) == 25
    assert times == sorted(times)
    assert times[10] > times[9]


def test_a_file_without_requests_does_not_begin_anew_for_ever(tmp_path: Path) -> None:
    """A head alone is an error."""
    path = tmp_path / "empty.jsonl"
    path.write_text('{"quire_arrivals": 1, "prefix_block_tokens": 64}\n')
    with pytest.raises(ArrivalError, match="no requests"):
        list(repeated(open_source(path), 5))
