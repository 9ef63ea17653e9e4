"""A child's restarts, its log, and the examples that are printed."""

import json
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from deploy.local import examples, launcher, logtail, runs
from deploy.local.children import Child, Launch, Role, Spec
from deploy.local.options import ROOT


@pytest.fixture
def child(tmp_path: Path) -> Child:
    """A worker that has not been started."""
    launch = Launch(argv=["true"], environ={}, ports={})
    spec = Spec(name="worker-0", role=Role.WORKER, prepare=lambda: launch)
    return Child(spec=spec, run_dir=tmp_path, cwd=tmp_path)


def test_back_off_grows_and_the_fifth_death_within_a_minute_is_the_last(child: Child) -> None:
    """Half a second, then twice as long each time."""
    assert [child.plan_restart(float(at)) for at in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert child.restart_at == 3 + 4.0
    assert child.plan_restart(59.9) is None


def test_deaths_long_ago_are_forgiven(child: Child) -> None:
    """A worker that dies once an hour is restarted for ever."""
    delays = [child.plan_restart(at * 61.0) for at in range(20)]
    assert delays == [0.5] * 20
    assert [child.plan_restart(20 * 61.0 + at * 15.1) for at in range(8)][-1] == 4.0


def line(event: str, level: str = "info", **fields: Any) -> bytes:
    """A log line as the services write it."""
    return json.dumps({"event": event, "level": level, **fields}).encode() + b"\n"


def test_news_are_warnings_and_a_bounded_number_of_them(child: Child, tmp_path: Path) -> None:
    """All of them are in the file."""
    log = tmp_path / "worker-0.log"
    log.write_bytes(line("listening", port=1) + line("slow", "warning", step=7, service="x"))
    assert child.news() == ["warning: slow step=7"]
    assert not child.ready
    log.write_bytes(log.read_bytes() + line("ready") + line("bad", "error") * 9)
    news = child.news()
    assert child.ready
    assert len(news) == logtail.SHOWN_LINES + 1
    assert news[-1].startswith("... 4 more in ")
    assert child.news() == []


def test_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    """A writer may be half way through; other text is passed over."""
    path = tmp_path / "log"
    tail = logtail.LogTail(path)
    assert tail.entries() == []
    whole = line("one")
    path.write_bytes(b"Traceback:\n{not json}\n[1]\n" + whole[:9])
    assert tail.entries() == []
    with path.open("ab") as file:
        file.write(whole[9:])
    assert [entry.event for entry in tail.entries()] == ["one"]


def test_a_fast_writer_is_followed_at_its_end(tmp_path: Path) -> None:
    """Memory stays bounded, whatever a child writes."""
    path = tmp_path / "log"
    path.write_bytes(line("early") + b"x" * (2 * logtail.READ_BYTES) + b"\n" + line("late"))
    assert [entry.event for entry in logtail.LogTail(path).entries()] == ["late"]


def test_a_log_is_begun_anew_when_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one is kept beside it."""
    monkeypatch.setattr(logtail, "ROTATE_BYTES", 100)
    path = tmp_path / "log"
    tail = logtail.LogTail(path)
    with path.open("ab") as file:
        file.write(line("one", text="x" * 200))
        file.flush()
        assert len(tail.entries()) == 1
        assert path.stat().st_size == 0
        file.write(line("two"))
    assert [entry.event for entry in tail.entries()] == ["two"]
    assert b"one" in (tmp_path / "log.1").read_bytes()


def test_old_run_folders_are_removed_and_those_in_use_kept(tmp_path: Path) -> None:
    """A bounded number of them stays."""
    for number in range(30):
        folder = tmp_path / f"20260101-0000{number:02}-1"
        folder.mkdir()
        pid = os.getpid() if number == 0 else 2**22 + 1
        (folder / runs.PID_FILE).write_text(f"{pid}\n")
    (tmp_path / "setup.lock").touch()
    fresh = runs.create(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert left[0] == "20260101-000000-1"
    assert len(left) == 1 + runs.KEPT
    assert fresh.name in left


def test_a_data_folder_belongs_to_one_launcher(tmp_path: Path) -> None:
    """Two servers must not write one file."""
    first = runs.hold(tmp_path / "data")
    assert first is not None
    assert runs.hold(tmp_path / "data") is None
    first.close()
    again = runs.hold(tmp_path / "data")
    assert again is not None
    again.close()


class Answering(BaseHTTPRequestHandler):
    """Streams a fixed answer in the framing of the API."""

    asked: list[tuple[str, Any]]
    keys: list[str | None]

    def do_POST(self) -> None:
        """Three chunks and the end."""
        length = int(self.headers["Content-Length"])
        self.asked.append((self.path, json.loads(self.rfile.read(length))))
        self.keys.append(self.headers.get("Authorization"))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        chat = "chat" in self.path
        deltas: list[Any] = [{"role": "assistant"}, {"content": "Par"}, {"content": "is."}, {}]
        for delta in deltas:
            text = {"delta": delta} if chat else {"text": delta.get("content", "")}
            choice = {"index": 0, "finish_reason": None, **text}
            chunk = {"id": "1", "object": "x", "created": 1, "model": "m", "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def do_GET(self) -> None:
        """Readiness."""
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def api() -> Any:
    """A server that answers as the gateway would."""
    handler = type("Handler", (Answering,), {"asked": [], "keys": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        examples.curl,
        examples.one_liner,
        pytest.param(examples.openai_sdk, marks=pytest.mark.slow),
    ],
)
def test_each_printed_example_works_as_printed(
    api: Any, make: Any, chat: bool, keyed: bool
) -> None:
    """Only the path of the environment differs here."""
    url, handler = api
    printed = make(url, "some'model", chat, keyed).replace(".venv/bin/python", sys.executable)
    environ = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    environ[examples.KEY_VARIABLE] = "sk-mine"
    answer = subprocess.run(
        ["sh", "-c", printed], capture_output=True, text=True, check=True, env=environ, cwd=ROOT
    ).stdout
    if make is not examples.curl:
        assert answer == "Paris.\n"
    assert "is." in answer
    assert (handler.keys[-1] == "Bearer sk-mine") is keyed
    path, body = handler.asked[-1]
    assert path == ("/v1/chat/completions" if chat else "/v1/completions")
    assert body["model"] == "some'model"
    assert body["stream"] is True
    assert examples.QUESTION in json.dumps(body)


def test_the_examples_are_printed_together() -> None:
    """In this order."""
    shown = examples.text("http://127.0.0.1:8000", "m", True)
    assert re.findall(r"^# (\w+)", shown, re.MULTILINE) == ["curl", "Python", "the"]


def test_a_template_is_found_where_models_keep_it(tmp_path: Path) -> None:
    """In a file of its own or in the tokenizer's settings."""
    assert not examples.has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert examples.has_chat_template(tmp_path)


def test_readiness_is_what_the_gateway_says(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a missing gateway is not ready."""
    monkeypatch.setattr(launcher, "PROBE_TIMEOUT_S", 20.0)
    assert launcher.gateway_is_ready(api[0])
    assert not launcher.gateway_is_ready(f"{api[0]}/other")
    assert not launcher.gateway_is_ready("http://127.0.0.1:1")
