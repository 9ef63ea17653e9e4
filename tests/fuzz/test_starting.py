"""What a service does before it serves: no default key, no pickled weights, no open door."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.stack import ROOT, Process
from tests.e2e.models import write_stub_model, write_tiny_llama
from tests.fuzz.asks import PICKLES
from tests.fuzz.sockets import listening, reached
from tests.fuzz.watched import BAIT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def ended(argv: list[str], folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """A process that must end by itself, with nothing in its environment but `settings`."""
    return subprocess.run(
        [sys.executable, "-m", *argv],
        env=bare() | settings,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def bare() -> dict[str, str]:
    """What Python needs."""
    return {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos' / 'gen'}",
        "PATH": os.environ["PATH"],
    }


def test_a_gateway_needs_to_be_told_of_a_model(tmp_path: Path) -> None:
    """An empty environment gives no server, no key and no guess."""
    end = ended(["gateway"], tmp_path)
    assert end.returncode == 1, end.stderr
    events = [json.loads(line) for line in (end.stdout + end.stderr).splitlines()]
    assert [event["event"] for event in events] == ["model_not_loaded"]
    assert "Traceback" not in end.stdout + end.stderr


@pytest.mark.parametrize("keys", [{}, {"QUIRE_API_KEYS_FILE": ""}])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "127.0.0.1.example.com"])
def test_no_public_address_without_keys(tmp_path: Path, host: str, keys: Mapping[str, str]) -> None:
    """The process ends with one line that names both settings."""
    end = ended(["gateway"], tmp_path, QUIRE_HOST=host, **keys)
    assert end.returncode == 2
    assert end.stdout == ""
    [line] = end.stderr.splitlines()
    assert "QUIRE_HOST" in line
    assert "QUIRE_API_KEYS_FILE" in line


async def test_with_a_model_alone_this_machine_is_served_and_nobody_else(tmp_path: Path) -> None:
    """Without keys and Redis it listens on loopback, refuses other Hosts, and calls only Redis."""
    environ = bare() | {
        "QUIRE_MODEL": str(write_stub_model(tmp_path / "m")),
        "QUIRE_PORT": "0",
        "QUIRE_GRPC_PORT": "0",
        "QUIRE_REDIS_URL": "redis://127.0.0.1:9/0",
    }
    gateway = Process("g", [sys.executable, "-m", "gateway"], environ, tmp_path / "log")
    gateway.start()
    try:
        await asyncio.to_thread(gateway.wait_event, "waiting_for_redis")
        assert listening(gateway.pid) == {("127.0.0.1", p) for p in gateway.ports.values()}
        assert {port for _, port in reached(gateway.pid)} <= {9}
        assert "no_api_keys" in [event["event"] for event in gateway.events()]
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{gateway.ports['rest']}", timeout=20
        ) as client:
            answer = await client.post(
                "/v1/completions", json={"prompt": "x"}, headers={"host": "quire.example.com"}
            )
            assert answer.status_code == 403
            answer = await client.post("/v1/completions", json={"prompt": "x"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                503,
                "service_unavailable",
            )
        assert gateway.terminate() == 0
    finally:
        gateway.destroy()


def test_a_worker_reads_no_pickled_weights(tmp_path: Path) -> None:
    """A folder with weights that would run code: refused by name, and the code does not run."""
    folder = write_tiny_llama(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", f"{BAIT}.bin", "model.pt", "training_args.bin"):
        (folder / name).write_bytes(PICKLES[2])
    log = tmp_path / "watch"
    end = ended(
        ["tests.fuzz.watched", "gpu_worker"], tmp_path, QUIRE_MODEL=str(folder), WATCH_LOG=str(log)
    )
    assert end.returncode == 1, end.stderr
    assert "pytorch_model.bin" in end.stdout + end.stderr
    assert not (tmp_path / BAIT).exists()
    doings: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    assert [d for d in doings if d["what"] in ("unpickled", "started", "opened")] == []
