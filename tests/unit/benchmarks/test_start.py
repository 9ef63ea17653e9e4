"""What the benchmark of a second start reads: logs, memory, goals."""

import itertools
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import start
from benchmarks.stack import StackError
from benchmarks.start import Held, Serving, Start
from deploy.local import procs

SMAPS = """\
7f0000000000-7f0040000000 rw-p 00000000 00:00 0
Size:            1048576 kB
Rss:                2048 kB
Pss:                2048 kB
VmFlags: rd wr mr mw me ac sd hg
7f0050000000-7f0060000000 rw-p 00000000 00:00 0                          [heap]
Size:             262144 kB
Rss:                1024 kB
VmFlags: rd wr mr mw me ac sd
7f0070000000-7f0070100000 r-xp 00000000 08:01 99                         /lib/libhg.so
Rss:                 512 kB
VmFlags: rd ex mr mw me
"""
MIB = 2**20


def test_areas_that_asked_for_large_pages_are_told_from_the_rest() -> None:
    assert start.resident_bytes(SMAPS) == ((2048 + 1024 + 512) * 1024, 2048 * 1024)


def test_weights_and_blocks_are_meant_to_be_there() -> None:
    held = Held(resident=1000 * MIB, large=400 * MIB, packed=250 * MIB, modules=100 * MIB)
    assert held.over == 500 * MIB
    text = start.tables([make_start(9.0)], held)
    lines = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in text.splitlines()
             if line.startswith("| ")}  # fmt: skip
    assert lines["KV blocks that were used"] == "150"
    assert lines["over weights and KV"] == "500"


def make_start(ready_s: float) -> Start:
    stage = start.Stage(name="launcher says ready", at_s=ready_s, took_s=ready_s)
    return Start(ready_s=ready_s, stages=(stage,), cpu_s={"gateway": 1.0})


def test_the_median_start_is_judged() -> None:
    over = Held(resident=2 * 2**30, large=0, packed=0, modules=0)
    starts = [make_start(s) for s in (30.0, 11.0, 12.5)]
    assert [of.text for of in start.verdicts(starts, over)] == ["missed", "missed"]
    assert [of.text for of in start.verdicts(starts[1:2], None)] == ["met", "not measured"]


def event(name: str, at: str, **more: object) -> str:
    return json.dumps({"event": name, "timestamp": f"2026-01-01T00:00:{at}Z", **more})


@pytest.fixture(autouse=True)
def _nothing_between_fork_and_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have left gRPC's threads in this process, which its forks may not survive."""
    monkeypatch.setattr(procs, "death_with_parent", lambda: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    children = {name: {"pid": os.getpid(), "ports": {}} for name in ("gateway", "worker-0")}
    (tmp_path / "stack.json").write_text(json.dumps({"children": children}))
    gateway = [event("model_loaded", "02.000000"), event("stream_up", "09.500000"), "a print"]
    worker = [
        event("listening", "01.500000"),
        event("loading weights", "06.000000"),
        event("model loaded", "07.000000"),
        event("model loaded", "09.000000"),
    ]
    (tmp_path / "gateway.log").write_text("\n".join(gateway) + "\n")
    (tmp_path / "worker-0.log").write_text("\n".join(worker) + "\n")
    (tmp_path / "scheduler_svc.log").write_text("")
    return tmp_path


def test_stages_are_taken_from_what_the_services_log(folder: Path) -> None:
    lines = {f"logs in {folder}": 0.25, "model x from y": 0.2, "ready after 9.4 s": 9.75}
    found = Serving(lines, datetime(2026, 1, 1, tzinfo=UTC), 8000).start()
    assert found.ready_s == 9.75
    assert {of.name: (of.at_s, of.took_s) for of in found.stages} == {
        "launcher looks for the model": (0.2, 0.2),
        "gateway: tokenizer loaded": (2.0, 2.0),
        "gateway reads the worker's tokens": (9.5, 7.5),
        "worker: its process runs": (1.5, 1.5),
        "worker: torch and transformers imported": (6.0, 4.5),
        # The first of the name: the service says it once more when all is done.
        "worker: weights read, layers probed": (7.0, 1.0),
        "launcher says ready": (9.75, pytest.approx(9.55)),
    }
    assert set(found.cpu_s) == {"gateway", "worker-0"}


def python(program: str) -> tuple[str, ...]:
    return sys.executable, "-c", program


def test_a_start_that_fails_says_what_went_to_stderr() -> None:
    program = "import sys; print('begins'); sys.exit('early\\n' * 40 + 'no such model')"
    with pytest.raises(StackError) as failed, start.serving(python(program)):
        pass
    lines = str(failed.value).splitlines()
    assert lines[:2] == ["not ready:", "begins"]
    assert lines[2:] == ["early"] * (start.LAST_LINES - 1) + ["no such model"]


def test_a_start_that_hangs_silently_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that does not listen to being asked."""
    monkeypatch.setattr(start, "END_S", 0.2)
    program = (
        "import os, signal, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "print(os.getpid(), 'hangs', file=sys.stderr, flush=True);"
        "print('begins', flush=True); time.sleep(300)"
    )
    # Looked at for the begin, for the first wait and when the line has come: then little is left.
    passed_s = itertools.chain([0.0, 0.0, 0.0], itertools.repeat(start.READY_S - 0.2))
    clock = SimpleNamespace(monotonic=lambda: next(passed_s))
    monkeypatch.setattr(start, "time", clock)
    with pytest.raises(StackError, match="hangs") as failed, start.serving(python(program)):
        pass
    pid = int(str(failed.value).splitlines()[-1].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_one_that_does_not_end_is_killed_and_told(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(start, "END_S", 0.2)
    program = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        f"print('logs in {folder}'); print('ready after 1 s', flush=True); time.sleep(300)"
    )
    told = pytest.raises(StackError, match=r"did not end within 0\.2 s")
    with told, start.serving(python(program)):
        pass


def test_what_the_system_refuses_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise subprocess.SubprocessError("Exception occurred in preexec_fn.")

    monkeypatch.setattr(start, "SERVE", python("print('ready after', flush=True)"))
    monkeypatch.setattr(procs, "death_with_parent", refuse)
    assert start.main(["--starts", "1"]) == 1
    assert "preexec_fn" in capsys.readouterr().err
