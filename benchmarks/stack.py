"""A whole Quire on this machine, process by process, under the caller's control.

Owns the processes of one stack: an embedded Valkey, a scheduler, workers and a gateway, started by
the same command lines as everywhere. Unlike the launcher it restarts nothing, so that a caller can
end and start each process by itself. All ports are free ones; nothing outlives the caller.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.client import Client
from deploy.local import ports, procs, valkey
from servicekit import model_files

ROOT = Path(__file__).resolve().parents[1]
START_S = 180.0
# Becomes the process given, after asking the kernel to end it with its parent. Nothing may run
# between fork and exec here, because the caller has gRPC's threads.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
_T = TypeVar("_T")


class StackError(Exception):
    """The stack did not do what was asked; the message carries the log's end."""


def wait_for(get: Callable[[], _T | None], what: Callable[[], str], timeout_s: float) -> _T:
    """Polls until `get` gives something true. Raises StackError saying `what` after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = get()
        if found:
            return found
        if time.monotonic() > deadline:
            raise StackError(f"not within {timeout_s:.0f} s: {what()}")
        time.sleep(0.05)


def fetch(url: str, timeout_s: float = 10.0) -> tuple[int, str]:
    """GET: status and text; status 0 if nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def cpu_seconds(pid: int, *, main_thread: bool = False) -> float:
    """CPU time of a process so far, all its threads or the main one; to a hundredth."""
    stat = Path(f"/proc/{pid}/task/{pid}/stat" if main_thread else f"/proc/{pid}/stat")
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Metrics:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name with these labels. Raises KeyError if there is none."""
        found = [
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        if not found:
            raise KeyError(name)
        return float(sum(found))

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """A histogram with these labels: observations up to each bound. Raises KeyError."""
        found: dict[float, float] = {}
        for sample in self._samples:
            if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items():
                bound = float(sample.labels["le"])
                found[bound] = found.get(bound, 0.0) + sample.value
        if not found:
            raise KeyError(name)
        return found


class Process:
    """One process and its log. `start` may be called again after it has ended."""

    def __init__(self, name: str, argv: list[str], environ: Mapping[str, str], log: Path) -> None:
        self.name, self.log = name, log
        self._argv, self._environ = argv, environ
        self._popen: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self.ports: dict[str, int] = {}

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._popen is not None
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return None if self._popen is None else self._popen.poll()

    def start(self) -> None:
        """Starts it; does not wait until it is ready."""
        assert self._popen is None or self._popen.poll() is not None
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self.ports = {}
        with self.log.open("ab") as sink:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid()), *self._argv],
                env=dict(self._environ),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )

    def events(self) -> Iterator[dict[str, object]]:
        """The JSON lines that it has logged since its start."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            for line in file:
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict):
                        yield event

    def wait_event(self, name: str, timeout_s: float = START_S) -> None:
        """Waits until it has logged that event; collects the ports on the way."""

        def look() -> bool:
            found = False
            for event in self.events():
                if event.get("event") == "listening":
                    self.ports[str(event["what"])] = int(str(event["port"]))
                found = found or event.get("event") == name
            if not found and self.returncode is not None:
                raise StackError(f"{self.name} ended with {self.returncode}\n{self.tail()}")
            return found

        wait_for(look, lambda: f"{self.name} logs {name!r}\n{self.tail()}", timeout_s)

    def metrics(self) -> Metrics:
        """A scrape of its ops port."""
        status, text = fetch(f"http://127.0.0.1:{self.ports['ops']}/metrics")
        if status != 200:
            raise StackError(f"{self.name}: /metrics answered {status}\n{self.tail()}")
        return Metrics(text)

    def tail(self, count: int = 25) -> str:
        """The log's last lines."""
        return "\n".join(procs.last_lines(self.log, count))

    def signal(self, number: int) -> None:
        """Sends a signal to this process alone."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        assert self._popen is not None
        self._popen.kill()
        self._popen.wait(10)

    def terminate(self, timeout_s: float = 30.0) -> int:
        """SIGTERM; its exit status. Raises StackError if it does not end in time."""
        if self.returncode is None:
            self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Its exit status. Raises StackError if it does not end in time."""
        assert self._popen is not None
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise StackError(f"{self.name} does not end\n{self.tail()}") from None

    def destroy(self) -> None:
        """Ends it and all it has started, at once; for cleaning up."""
        if self._popen is not None and self._popen.poll() is None:
            procs.kill_group(self._popen)
            self._popen.wait(10)


class Stack:
    """Processes and where they listen. Use as a context manager, or call `start` and `stop`."""

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        workers: int = 1,
        schedulers: int = 1,
        gateways: int = 1,
        worker_module: str = "gpu_worker",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._free = ports.FreePorts()
        self._worker_module = worker_module
        self.redis_port = self._free.take()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
        threads = str(max(1, len(os.sched_getaffinity(0)) // workers))
        self._environ = {
            **inherited,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos' / 'gen'}",
            "QUIRE_MODEL": model,
            "QUIRE_REDIS_URL": f"redis://127.0.0.1:{self.redis_port}/0",
            "QUIRE_NUM_THREADS": threads,
            "OMP_NUM_THREADS": threads,
            "QUIRE_DRAIN_S": "5",
            "OMP_WAIT_POLICY": "PASSIVE",
            **(settings or {}),
        }
        data = folder / "redis"
        data.mkdir(exist_ok=True)
        self.redis = Process(
            "redis",
            valkey.command(valkey.binary(), self.redis_port, data),
            inherited,
            folder / "redis.log",
        )
        self.schedulers = [
            self._service("scheduler_svc", f"scheduler-{i}" if i else "scheduler")
            for i in range(schedulers)
        ]
        self.gateways = [self._gateway(f"gateway-{i}" if i else "gateway") for i in range(gateways)]
        self.workers: list[Process] = []
        for _ in range(workers):
            self.add_worker()

    def _service(self, module: str, name: str, **settings: str) -> Process:
        argv = [sys.executable, "-m", module]
        return Process(name, argv, {**self._environ, **settings}, self.folder / f"{name}.log")

    def _gateway(self, name: str) -> Process:
        rest, grpc = (str(self._free.take()) for _ in range(2))
        return self._service("gateway", name, QUIRE_PORT=rest, QUIRE_GRPC_PORT=grpc)

    def add_worker(self) -> Process:
        """One more worker, with a name of its own; not yet started."""
        name = f"worker-{len(self.workers)}"
        self.workers.append(self._service(self._worker_module, name, QUIRE_WORKER_ID=name))
        return self.workers[-1]

    @property
    def scheduler(self) -> Process:
        """The first, which leads unless it has been ended."""
        return self.schedulers[0]

    @property
    def gateway(self) -> Process:
        """The first."""
        return self.gateways[0]

    @property
    def processes(self) -> list[Process]:
        """In the order in which they end."""
        return [*self.gateways, *self.workers, *self.schedulers[::-1], self.redis]

    @property
    def client(self) -> Client:
        """For the first gateway."""
        return self.client_of(self.gateway)

    @staticmethod
    def client_of(gateway: Process) -> Client:
        """For one gateway."""
        return Client(host="127.0.0.1", port=gateway.ports["rest"])

    @property
    def base_url(self) -> str:
        """Of the REST interface."""
        return f"http://127.0.0.1:{self.gateway.ports['rest']}"

    @property
    def grpc_address(self) -> str:
        """Of the gRPC interface."""
        return f"127.0.0.1:{self.gateway.ports['grpc']}"

    @property
    def model_name(self) -> str:
        """As served."""
        named = self._environ.get("QUIRE_SERVED_MODEL_NAME", "")
        return model_files.served_name(named, self._environ["QUIRE_MODEL"])

    def start_redis(self) -> None:
        """Starts Redis and waits until it answers."""
        self.redis.start()
        wait_for(
            lambda: valkey.answers(self.redis_port), lambda: f"Redis\n{self.redis.tail()}", 20.0
        )

    def start(self) -> None:
        """Starts everything; returns when the gateway says that a worker can serve."""
        try:
            self.start_redis()
            for process in (self.scheduler, *self.workers, *self.gateways):
                process.start()
            for process in (self.scheduler, *self.workers):
                process.wait_event("ready")
            for standby in self.schedulers[1:]:
                standby.start()
                standby.wait_event("standing_by")
            for gateway in self.gateways:
                gateway.wait_event("listening")
            self.wait_ready()
        except BaseException:
            self.destroy()
            raise

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Waits until each gateway says that a worker can serve."""
        for gateway in self.gateways:
            self._wait_ready(gateway, timeout_s)

    @staticmethod
    def _wait_ready(gateway: Process, timeout_s: float) -> None:
        gateway.wait_event("ready", timeout_s)
        url = f"http://127.0.0.1:{gateway.ports['rest']}/ready"
        wait_for(
            lambda: fetch(url)[0] == 200,
            lambda: f"/ready: {fetch(url)}\n{gateway.tail()}",
            timeout_s,
        )

    def stop(self) -> None:
        """Drains in the launcher's order. Raises StackError unless all end by themselves."""
        try:
            ends = {p.name: p.terminate() for p in self.processes if p.returncode is None}
        finally:
            self.destroy()
        bad = {name: code for name, code in ends.items() if code != 0}
        if bad:
            raise StackError(f"ended with a status other than 0: {bad}")

    def destroy(self) -> None:
        """Ends whatever still runs, at once."""
        for process in self.processes:
            process.destroy()

    def __enter__(self) -> "Stack":
        self.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.stop()
        else:
            self.destroy()
