"""The manifests' probes, asked as a kubelet asks them: over the pod's address, at their own pace.

A container has started when its startup probe has succeeded once; after that readiness and liveness
are asked. As many failures in a row as the manifest allows change what is known of it. The kubelet
would restart a container that is not live; the run notes it as a problem instead.
"""

import asyncio
import http.client
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.k8s_check.objects import ports

Execute = Callable[[tuple[str, ...], float], Awaitable[str]]
_TICK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One probe of a container. Either `command` or `path` and `port`."""

    kind: str
    command: tuple[str, ...] = ()
    path: str = ""
    port: int = 0
    period_s: float = 10.0
    timeout_s: float = 1.0
    num_failures: int = 3
    delay_s: float = 0.0

    @property
    def budget_s(self) -> float:
        """Seconds until one that never succeeds has failed."""
        return self.delay_s + self.num_failures * max(self.period_s, self.timeout_s)


def read(container: Mapping[str, Any], kind: str) -> Probe | None:
    """The container's probe of that kind, with Kubernetes' defaults. Raises KeyError."""
    found = container.get(kind)
    if found is None:
        return None
    command: tuple[str, ...] = ()
    path, port = "", 0
    if "exec" in found:
        command = tuple(found["exec"]["command"])
    else:
        asked = found["httpGet"]
        path = str(asked.get("path", "/"))
        port = int(ports(container).get(asked["port"], asked["port"]))
    return Probe(
        kind=kind,
        command=command,
        path=path,
        port=port,
        period_s=float(found.get("periodSeconds", 10)),
        timeout_s=float(found.get("timeoutSeconds", 1)),
        num_failures=int(found.get("failureThreshold", 3)),
        delay_s=float(found.get("initialDelaySeconds", 0)),
    )


def fetch(address: str, probe: Probe) -> str:
    """The body of a good answer. Blocks for up to the probe's timeout; raises OSError."""
    connection = http.client.HTTPConnection(address, probe.port, timeout=probe.timeout_s)
    try:
        connection.request("GET", probe.path)
        answer = connection.getresponse()
        body = answer.read().decode()
    except http.client.HTTPException as error:
        raise ConnectionError(repr(error)) from error
    finally:
        connection.close()
    if not 200 <= answer.status < 400:
        raise ConnectionError(f"status {answer.status}")
    return body


def ask_http(address: str, probe: Probe) -> str:
    """Why the probe fails; empty if it succeeds."""
    try:
        fetch(address, probe)
    except OSError as error:
        return f"{probe.path} on {probe.port}: {error or type(error).__name__}"
    return ""


class Watch:
    """What is known of one container. `run` asks; everything else reads."""

    def __init__(
        self, name: str, container: Mapping[str, Any], address: str, execute: Execute
    ) -> None:
        self.name = name
        self.started = self.ready = self.given_up = False
        self.last_failure = "not asked yet"
        self.problems: list[str] = []
        self.num_asked = 0
        self._startup = read(container, "startupProbe")
        self._others = [
            probe
            for kind in ("readinessProbe", "livenessProbe")
            if (probe := read(container, kind)) is not None
        ]
        self._address, self._execute = address, execute
        self._failures: dict[str, int] = {}
        self._life = 0
        self._disturbed = False

    @property
    def budget_s(self) -> float:
        """Seconds in which the container must have started and become ready."""
        probes = [self._startup, *(p for p in self._others if p.kind == "readinessProbe")]
        return sum(probe.budget_s for probe in probes if probe is not None)

    def restarted(self) -> None:
        """Begins anew: the container was ended on purpose and starts again."""
        self._life += 1
        self.started = self.ready = False
        self.last_failure = "not asked since it was restarted"
        self._failures.clear()

    def leave(self) -> None:
        """From here on it is being ended, and nothing that fails is a problem."""
        self._disturbed = True

    async def run(self) -> None:
        """Asks until cancelled, or until the startup probe has failed for good."""
        if self._startup is None:
            self.started = True
        due: dict[str, float] = {}
        while not self.given_up:
            probes = self._others
            if self._startup is not None and not self.started:
                probes = [self._startup]
            now = time.monotonic()
            for probe in probes:
                if now >= due.setdefault(probe.kind, now + probe.delay_s):
                    due[probe.kind] = now + probe.period_s
                    life = self._life
                    failure = await self._ask(probe)
                    if life == self._life:  # else it is an answer of the one that was ended
                        self.tell(probe, failure)
            await asyncio.sleep(_TICK_S)

    def tell(self, probe: Probe, failure: str) -> None:
        """One answer: empty, or why it failed."""
        self.num_asked += 1
        if not failure:
            self._failures[probe.kind] = 0
            self.started |= probe.kind == "startupProbe"
            self.ready |= probe.kind == "readinessProbe"
            return
        self.last_failure = f"{probe.kind}: {failure}"
        count = self._failures[probe.kind] = self._failures.get(probe.kind, 0) + 1
        if count != probe.num_failures:
            return
        was_ready = self.ready
        if probe.kind == "readinessProbe":
            self.ready = False
        if probe.kind == "startupProbe":
            self.given_up = True
        if not self._disturbed and (was_ready or probe.kind != "readinessProbe"):
            self.problems.append(f"{self.name}: {count} times in a row: {self.last_failure}")

    async def _ask(self, probe: Probe) -> str:
        if probe.command:
            return await self._execute(probe.command, probe.timeout_s)
        return await asyncio.to_thread(ask_http, self._address, probe)
