"""An embedded Valkey for the registry's tests."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local import valkey
from deploy.local.ports import FreePorts


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that lives as long as the module's tests."""
    folder: Path = tmp_path_factory.mktemp("valkey")
    port = FreePorts().take()
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(valkey.command(valkey.binary(), port, folder), stdout=log)
    deadline = time.monotonic() + 40
    while not valkey.answers(port):
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.02)
    # A machine that stands still for seconds is no server that is away.
    yield f"redis://127.0.0.1:{port}/0?timeout=20&socket_timeout=20&socket_connect_timeout=20"
    server.kill()
    server.wait()
