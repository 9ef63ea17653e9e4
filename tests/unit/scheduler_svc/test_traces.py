"""Trace files: written within their bounds, for their owner alone, and replayed byte for byte."""

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler_svc import replay, trace_file
from scheduler_svc.core import CoreConfig, Ready, SchedulerCore
from scheduler_svc.core.events import (
    BecameLeader,
    Event,
    GatewayLost,
    RequestArrived,
    RequestCancelled,
    StepCompleted,
    StepFailed,
    Tick,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerSubscribed,
)
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
from scheduler_svc.recorder import MAX_FILES, TraceRecorder
from tests.builders import make_request
from tests.unit.scheduler_core.test_long_run import History

W = WorkerId("w\n\u2028")
EVENTS: tuple[Event, ...] = (
    BecameLeader(now_ns=1, epoch=7),
    Tick(now_ns=2),
    RequestArrived(
        now_ns=3,
        request_id=RequestId(b"\x00\xff"),
        entry_id="5-0",
        attempt=2,
        gateway_id="g",
        prompt_token_ids=(1, 2, 2**31 - 1),
        output_token_ids=(4,),
        sampling=SamplingSpec(
            max_tokens=5,
            temperature=0.1,
            top_p=1 / 3,
            seed=2**64 - 1,
            stop_token_ids=(6, 7),
            logit_bias=((8, -0.3), (9, 1e-9)),
            num_logprobs=0,
            prompt_logprobs=True,
        ),
        priority=-3,
        deadline_ns=10**18,
        cache_salt=b"salt",
        traceparent="00-a",
        tenant="t",
        tenant_weight=0.7,
    ),
    RequestCancelled(now_ns=4, request_id=RequestId(b"r")),
    GatewayLost(now_ns=5, gateway_id="g"),
    WorkerJoined(
        now_ns=6,
        worker_id=W,
        capacity=WorkerCapacity(
            num_slots=1, num_blocks=2, block_size=3, max_num_batched_tokens=4, max_model_len=5
        ),
        cost=CostProfile(step_us=1.5, token_us=0.1),
        gateway_ids=frozenset({"b", "a"}),
        snapshot_attempts={RequestId(b"r"): 3},
    ),
    WorkerLost(now_ns=7, worker_id=W),
    WorkerDraining(now_ns=8, worker_id=W),
    WorkerSubscribed(now_ns=9, worker_id=W, gateway_ids=frozenset()),
    StepCompleted(
        now_ns=10,
        worker_id=W,
        step=11,
        slots=(Slot(0), Slot(3)),
        token_ids=(5, 6),
        finished=((Slot(3), FinishReason.STOP),),
        num_wasted_rows=1,
        step_us=77,
    ),
    StepFailed(now_ns=12, worker_id=W, step=13, scope=FaultScope.WORKER, reason="a\nb"),
)


def test_every_kind_of_event_is_among_the_examples() -> None:
    assert {type(event) for event in EVENTS} == set(trace_file._EVENTS.values())


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    (line,) = trace_file.event_lines([event])
    assert "\n" not in line
    text = [trace_file.FIRST_LINE, trace_file.config_line(CoreConfig()), line, "."]
    trace = trace_file.read(f"{each}\n" for each in text)
    assert trace.rounds[0].events == (event,)


def test_equal_events_have_equal_lines() -> None:
    event = WorkerSubscribed(now_ns=9, worker_id=WorkerId("w"), gateway_ids=frozenset("hgfedcba"))
    (line,) = trace_file.event_lines([event])
    assert line == (
        'E {"gateway_ids":["a","b","c","d","e","f","g","h"],"now_ns":9,"type":"WorkerSubscribed",'
        '"worker_id":"w"}'
    )


def test_a_configuration_comes_back_as_it_was() -> None:
    config = CoreConfig(scheduling_policy="fair", watermark=0.1, hash_key=b"\x00k", max_skips=3)
    text = f"{trace_file.FIRST_LINE}\n{trace_file.config_line(config)}\n"
    assert trace_file.read(text.splitlines(keepends=True)).config == config


def test_the_gateways_secret_is_left_out() -> None:
    (line,) = trace_file.event_lines([make_request("a", reply_to=b"do not tell")])
    assert b"do not tell".hex() not in line
    assert "reply_to" not in line


class Recorded(SchedulerCore):
    """A core whose rounds are recorded, as the driver records them."""

    def __init__(self, config: CoreConfig, folder: Path, max_bytes: int = 2**30) -> None:
        super().__init__(config)
        self.recorder = TraceRecorder(folder, epoch=5, config=config, max_bytes=max_bytes)

    def feed(self, event: Event) -> None:
        self.recorder.fed([event])
        super().feed(event)

    def take_ready(self) -> Ready:
        ready = super().take_ready()
        self.recorder.answered(ready)
        return ready


def record(folder: Path, *, num_events: int = 400, max_bytes: int = 2**30) -> Path:
    """A random history with several workers, losses and preemptions."""
    history = History(3, 2)
    core = Recorded(
        replace(history.cluster.core.config, scheduling_policy="fair"), folder, max_bytes
    )
    history.cluster.core = core
    history.cluster.workers.clear()
    core.feed(BecameLeader(now_ns=0, epoch=5))
    for name in ("w0", "w1"):
        history.join(name)
    history.play(num_events)
    core.recorder.close()
    return core.recorder.path


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_a_history_replays_byte_for_byte_in_any_process(tmp_path: Path, hash_seed: str) -> None:
    path = record(tmp_path)
    assert path.read_text().count("R finish") > 10
    ran = subprocess.run(
        [sys.executable, "-m", "scheduler_svc.replay", str(path)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "rounds are equal" in ran.stdout


def test_the_first_difference_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = record(tmp_path)
    text = path.read_text()
    at = text.index("num_rows=2")
    path.write_text(text[:at] + "num_rows=3" + text[at + 10 :])
    assert replay.main([str(path)]) == 1
    shown = capsys.readouterr().out
    assert "num_rows=3" in shown
    assert "num_rows=2" in shown


def test_an_unfinished_end_is_no_difference(tmp_path: Path) -> None:
    path = record(tmp_path)
    text = path.read_text()
    for cut in (text.rindex("\nE ") + 9, text.rindex("\nE ") + 1, text.rindex("\n.")):
        path.write_text(text[:cut])
        assert replay.main([str(path)]) == 0


@pytest.mark.parametrize(
    "text",
    ["", "other 1\n", "quire-trace 1\n", "quire-trace 1\nC {}\nE {\n", "quire-trace 1\nC {}\n?\n"],
)
def test_what_is_no_trace_is_said_to_be_none(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    assert replay.main([str(path)]) == 2
    assert str(path) in capsys.readouterr().out


def test_a_trace_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    path = record(folder, num_events=3)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_full_trace_ends_with_a_word_and_still_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(tmp_path, max_bytes=50_000)
    text = path.read_text()
    assert 40_000 < len(text) <= 50_000 + 100
    assert text.splitlines()[-1].startswith("- stopped: ")
    assert replay.main([str(path)]) == 0
    assert "would pass 50000 bytes" in capsys.readouterr().out


def test_the_folder_keeps_a_bounded_number_of_files(tmp_path: Path) -> None:
    for epoch in range(MAX_FILES + 5):
        TraceRecorder(tmp_path, epoch=epoch, config=CoreConfig(), max_bytes=10**6).close()
    (tmp_path / "other").touch()
    names = sorted(path.name for path in tmp_path.glob("*.trace"))
    assert len(names) == MAX_FILES
    assert names[0].startswith("scheduler-000000000005-")
    assert (tmp_path / "other").exists()


def test_nothing_is_overwritten_and_no_link_is_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    first = TraceRecorder(tmp_path, epoch=1, config=CoreConfig(), max_bytes=10**6)
    first.close()
    first.path.unlink()
    first.path.symlink_to(elsewhere)
    second = TraceRecorder(tmp_path, epoch=1, config=CoreConfig(), max_bytes=10**6)
    second.fed([Tick(now_ns=1)])
    second.answered(Ready())
    second.close()
    assert elsewhere.read_text() == "mine"


def test_a_folder_that_cannot_be_made_ends_the_recording_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = TraceRecorder(tmp_path / "file", epoch=1, config=CoreConfig(), max_bytes=10**6)
    recorder.fed([Tick(now_ns=1)])
    recorder.close()
