"""The launcher: when it is told to end, when a child dies, when it is killed itself."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.local import procs, valkey
from deploy.local.options import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.redis]
LIMIT_S = 40.0


class Running:
    """One fake stack in a folder."""

    def __init__(self, folder: Path, orders: dict[str, Any]) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        (folder / "orders.json").write_text(json.dumps(orders))
        with (folder / "output").open("wb") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.launcher.fake_stack", str(folder)],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What the launcher has printed."""
        return (self.folder / "output").read_text()

    @property
    def notes(self) -> list[str]:
        """What the children have noted."""
        path = self.folder / "notes"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def state(self) -> dict[str, Any]:
        """stack.json."""
        state: dict[str, Any] = json.loads((self.folder / "stack.json").read_text())
        return state

    def until(self, what: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Waits for a condition; fails with the launcher's output."""
        deadline = time.monotonic() + limit_s
        while not what():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def until_ready(self) -> "Running":
        """Waits for the printed examples."""
        self.until(lambda: "THE EXAMPLES" in self.output)
        return self

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signals the launcher and waits for its end."""
        self.launcher.send_signal(number)
        return self.launcher.wait(LIMIT_S)


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts stacks and leaves none behind."""
    stacks: list[Running] = []

    def make(orders: dict[str, Any] | None = None, name: str = "a") -> Running:
        stacks.append(Running(tmp_path / name, orders or {}))
        return stacks[-1]

    yield make
    for stack in stacks:
        procs.kill_group(stack.launcher)
        stack.launcher.wait()


def test_a_drain_ends_gateway_workers_scheduler_and_redis_in_that_order(
    start: Callable[..., Running],
) -> None:
    """Each stage begins only when the one before is over; the workers are told together."""
    slow = {"end_s": 0.3}
    orders = {
        "gateway": slow,
        "worker-0": slow | {"ends_after": "worker-1 told"},
        "worker-1": {"ends_after": "worker-0 told"},
        "scheduler_svc": slow,
    }
    stack = start(orders).until_ready()
    pids = stack.state["pids"]
    assert stack.end() == 0, stack.output
    ends = [line for line in stack.notes if line.split()[1] in {"told", "ended"}]
    assert ends[:2] == ["gateway told", "gateway ended"]
    assert set(ends[2:4]) == {"worker-0 told", "worker-1 told"}
    assert set(ends[4:6]) == {"worker-0 ended", "worker-1 ended"}
    assert ends[6:] == ["scheduler_svc told", "scheduler_svc ended"]
    assert not any(is_alive(pid) for pid in pids.values())
    assert "stopped" in stack.output


def test_ctrl_c_reaches_the_launcher_alone(start: Callable[..., Running]) -> None:
    """A terminal sends SIGINT to its whole foreground group; the children are not in it."""
    stack = start().until_ready()
    os.killpg(stack.launcher.pid, signal.SIGINT)
    assert stack.launcher.wait(LIMIT_S) == 0
    assert not [line for line in stack.notes if "interrupted" in line]


def test_a_child_that_does_not_listen_is_killed_and_the_rest_still_drains(
    start: Callable[..., Running],
) -> None:
    """The gateway's stage is drain_s plus its margin, whatever the next stage may have."""
    orders = {"gateway": {"deaf": True}, "drain_s": 0.2, "worker_stage_s": 600}
    stack = start(orders).until_ready()
    began = time.monotonic()
    assert stack.end() == 0
    assert time.monotonic() - began >= 2.7
    assert re.search(r"gateway did not end within [\d.]+ s; killed", stack.output)
    assert "scheduler_svc ended" in stack.notes


def test_a_second_signal_ends_everything_at_once(start: Callable[..., Running]) -> None:
    """Also children that do not listen, and what they have started."""
    orders = {"gateway": {"deaf": True, "grandchild": True}, "drain_s": 600}
    stack = start(orders).until_ready()
    pids = stack.state["pids"]
    grandchild = next(int(n.split()[2]) for n in stack.notes if "grandchild" in n)
    stack.launcher.send_signal(signal.SIGINT)
    stack.until(lambda: "gateway told" in stack.notes)
    assert stack.end(signal.SIGINT) == 130
    assert not any(is_alive(pid) for pid in pids.values())
    stack.until(lambda: not is_alive(grandchild))


def test_a_dead_worker_is_reported_and_restarted(start: Callable[..., Running]) -> None:
    """The others are not touched."""
    stack = start().until_ready()
    stack.until(lambda: "[worker-1] warning: odd" in stack.output)  # it is in its log by then
    before = stack.state["pids"]
    os.kill(before["worker-1"], signal.SIGKILL)
    stack.until(lambda: stack.state["pids"]["worker-1"] != before["worker-1"])
    after = stack.state["pids"]
    assert {n: p for n, p in after.items() if n != "worker-1"} == {
        n: p for n, p in before.items() if n != "worker-1"
    }
    assert "worker-1 has died (signal SIGKILL)" in stack.output
    assert "| warning: odd who=worker-1" in stack.output
    assert "worker-1 restarts in 0.5 s" in stack.output
    assert stack.end() == 0


def test_five_deaths_within_a_minute_end_the_launcher(start: Callable[..., Running]) -> None:
    """With a back-off between them; the others are drained."""
    stack = start({"worker-0": {"die_s": 0.05}})
    began = time.monotonic()
    assert stack.launcher.wait(LIMIT_S) == 1
    assert time.monotonic() - began > 7
    assert stack.notes.count("worker-0 started") == 5
    assert stack.output.count("the last words") >= 5
    assert "worker-0 died 5 times within a minute" in stack.output
    assert "gateway ended" in stack.notes


def test_a_worker_with_wrong_settings_is_not_restarted(start: Callable[..., Running]) -> None:
    """Exit status 2 says that the settings are wrong."""
    stack = start({"worker-0": {"die_s": 0.05, "status": 2}})
    assert stack.launcher.wait(LIMIT_S) == 1
    assert stack.notes.count("worker-0 started") == 1


@pytest.mark.parametrize("name", ["gateway", "scheduler_svc", "redis"])
def test_any_other_death_ends_the_launcher(start: Callable[..., Running], name: str) -> None:
    """Nothing can be served without it."""
    stack = start().until_ready()
    pids = stack.state["pids"]
    os.kill(pids[name], signal.SIGKILL)
    assert stack.launcher.wait(LIMIT_S) == 1
    assert f"{name} has died (signal SIGKILL)" in stack.output
    assert not any(is_alive(pid) for pid in pids.values())


def test_sigkill_of_the_launcher_ends_all_children(start: Callable[..., Running]) -> None:
    """By the kernel: Valkey and deaf children too."""
    stack = start({"gateway": {"deaf": True}}).until_ready()
    pids = stack.state["pids"]
    assert set(pids) == {"redis", "scheduler_svc", "worker-0", "worker-1", "gateway"}
    assert all(is_alive(pid) for pid in pids.values())
    stack.launcher.kill()
    stack.launcher.wait()
    stack.until(lambda: not any(is_alive(pid) for pid in pids.values()))


def test_two_stacks_run_at_once(start: Callable[..., Running]) -> None:
    """Each with a Redis of its own; ending one leaves the other alone."""
    one = start(name="a").until_ready()
    two = start(name="b").until_ready()
    ports = one.state["redis_port"], two.state["redis_port"]
    assert ports[0] != ports[1]
    assert one.end() == 0
    assert not valkey.answers(ports[0])
    assert valkey.answers(ports[1], LIMIT_S)
    assert two.end() == 0


def test_warnings_of_children_are_echoed(start: Callable[..., Running]) -> None:
    """With the child's name and the fields."""
    stack = start().until_ready()
    stack.until(lambda: "[worker-0] warning: odd who=worker-0" in stack.output)


def test_the_stack_outlives_the_reader_of_its_output(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    """`make serve | head` must not end the service half way."""
    folder = tmp_path / "piped"
    folder.mkdir()
    (folder / "orders.json").write_text("{}")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.launcher.fake_stack", str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert launcher.stdout is not None
    launcher.stdout.readline()
    launcher.stdout.close()
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (folder / "stack.json").exists():  # it has told of each child by then
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.5)
        assert launcher.poll() is None
    finally:
        launcher.terminate()
        assert launcher.wait(LIMIT_S) == 0
