"""python -m benchmarks.profile.worker: the shipped worker, with a clock at every operator.

Takes the settings of gpu_worker, and PROFILE_LOG, a file that is written at the end: one
`record.Record`. Two clock readings an operator are some 60 microseconds of a step of 30 layers.
Operators are called one by one here, for their clocks; without them they run as a program.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from structlog.typing import FilteringBoundLogger

from benchmarks.profile.record import (
    ACTIVATION,
    ATTENTION,
    DOWN,
    EMBED,
    GATE_UP,
    HEAD,
    MAX_STEPS,
    NORM,
    OUT,
    PARTS,
    QKV,
    STORE,
    Record,
    Step,
)
from gpu_worker import fused_operators, settings
from gpu_worker.app import Worker
from gpu_worker.ports import ModelRunner, Operation, RunnerInfo, ScheduledRow, StepOutput
from gpu_worker.quantization import NONE
from gpu_worker.settings import WorkerSettings
from servicekit import logs, process


class Parts:
    """Nanoseconds by part since `taken` was asked last."""

    def __init__(self) -> None:
        self._ns = dict.fromkeys(PARTS, 0)

    def add(self, part: str, ns: int) -> None:
        """More of a part."""
        self._ns[part] += ns

    def taken(self) -> dict[str, int]:
        """All parts; they begin at 0 again."""
        taken, self._ns = self._ns, dict.fromkeys(PARTS, 0)
        return taken


class Timed:
    """A callable whose time is booked under `part`."""

    def __init__(self, inner: Any, part: str, parts: Parts) -> None:
        self.inner, self.part = inner, part
        self._add = parts.add

    @property
    def kind(self) -> str:
        """Of a linear layer."""
        return str(self.inner.kind)

    def __call__(self, *inputs: Any) -> Any:
        """As the inner one."""
        began = time.monotonic_ns()
        made = self.inner(*inputs)
        self._add(self.part, time.monotonic_ns() - began)
        return made


class TimedOperators(fused_operators.NativeOperators):
    """The native operators under a clock.

    Linear layers come in the order in which gpu_worker.fused makes them: of a layer those of
    several modules (queries, keys and values; gate and up), then two of one module (output, down);
    after all layers the head.
    """

    def __init__(self, parts: Parts, *, deterministic: bool, quantization: str = NONE) -> None:
        super().__init__(deterministic=deterministic, quantization=quantization)
        self._parts = parts
        self.linears: list[Timed] = []

    def linear(self, modules: Sequence[Any], *, head: bool = False) -> Any:
        """See Operators."""
        part = (QKV, GATE_UP, OUT, DOWN)[len(self.linears) % 4]
        self.linears.append(self._timed(super().linear(modules, head=head), part))
        return self.linears[-1]

    def norm(self, *arguments: Any, **named: Any) -> Any:
        """See Operators."""
        return self._timed(super().norm(*arguments, **named), NORM)

    def activation(self, **named: Any) -> Any:
        """See Operators."""
        return self._timed(super().activation(**named), ACTIVATION)

    def attend(self, *arguments: Any) -> Any:
        """See Operators."""
        return self._timed(super().attend(*arguments), ATTENTION)

    def store(self, *arguments: Any, **named: Any) -> Any:
        """See Operators."""
        return self._timed(super().store(*arguments, **named), STORE)

    def settle(self) -> dict[str, int]:
        """Names the head, once all layers are there; bytes of packed weights by part."""
        assert len(self.linears) % 4 == 1, "four linear layers a layer, and the head"
        self.linears[-1].part = HEAD
        held: dict[str, int] = {}
        for linear in self.linears:
            packed = getattr(linear.inner, "packed", None)
            if packed is not None:
                held[linear.part] = held.get(linear.part, 0) + packed.nbytes
        return held

    def _timed(self, inner: Any, part: str) -> Timed:
        return Timed(inner, part, self._parts)


class TimedRunner:
    """A ModelRunner that notes the steps of another one."""

    def __init__(
        self, inner: ModelRunner, parts: Parts, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._inner = inner
        self._parts = parts
        self._clock_ns = clock_ns
        self.steps: deque[Step] = deque(maxlen=MAX_STEPS)

    @property
    def info(self) -> RunnerInfo:
        """See ports.ModelRunner."""
        return self._inner.info

    def run(self, rows: Sequence[ScheduledRow]) -> StepOutput:
        """See ports.ModelRunner."""
        self._parts.taken()
        began_ns = self._clock_ns()
        output = self._inner.run(rows)
        self.steps.append(
            Step(
                began_ns=began_ns,
                ended_ns=self._clock_ns(),
                num_rows=len(rows),
                num_tokens=sum(len(row.token_ids) for row in rows),
                contexts=sum(row.start + len(row.token_ids) for row in rows),
                apply_us=output.apply_us,
                forward_us=output.forward_us,
                sample_us=output.sample_us,
                parts_ns=self._parts.taken(),
            )
        )
        return output

    def begin_operations(self, operations: Sequence[Operation]) -> None:
        """See ports.ModelRunner."""
        self._inner.begin_operations(operations)

    def finished_operations(self, *, wait: bool) -> Sequence[int]:
        """See ports.ModelRunner."""
        return self._inner.finished_operations(wait=wait)


class Profile:
    """Loads a runner under clocks, and keeps what they show."""

    def __init__(self) -> None:
        self._parts = Parts()
        self._operators: TimedOperators | None = None
        self._weight_bytes: dict[str, int] = {}
        self._runner: TimedRunner | None = None
        self._embed_began_ns = 0

    def load(self, configured: WorkerSettings, log: FilteringBoundLogger) -> ModelRunner:
        """As gpu_worker loads one, with these operators in the native ones' place.

        Raises RuntimeError where the lean forward does not compute.
        """
        from gpu_worker.runner import load_runner

        fused_operators.NativeOperators = self._make  # type: ignore[misc, assignment]
        self._watch_embedding()
        self._runner = TimedRunner(load_runner(configured, log), self._parts)
        if self._operators is None:
            raise RuntimeError("there is no lean forward on native kernels to look into")
        self._weight_bytes = self._operators.settle()
        return self._runner

    def write(self, path: str) -> None:
        """The record."""
        steps = [] if self._runner is None else list(self._runner.steps)
        record = Record(steps=steps, weight_bytes=self._weight_bytes)
        Path(path).write_text(json.dumps(asdict(record)))

    def _make(self, *, deterministic: bool, quantization: str = NONE) -> TimedOperators:
        self._operators = TimedOperators(
            self._parts, deterministic=deterministic, quantization=quantization
        )
        return self._operators

    def _watch_embedding(self) -> None:
        """The one module of the lean forward that is torch's own."""
        from torch.nn.modules import module

        def before(_module: Any, _inputs: Any) -> None:
            self._embed_began_ns = time.monotonic_ns()

        def after(_module: Any, _inputs: Any, _output: Any) -> None:
            self._parts.add(EMBED, time.monotonic_ns() - self._embed_began_ns)

        module.register_module_forward_pre_hook(before)
        module.register_module_forward_hook(after)


async def main(argv: list[str], environ: dict[str, str], stop: asyncio.Event) -> int:
    """Serves until told to stop, then writes."""
    configured = settings.load(argv, environ)
    logs.configure("gpu_worker", configured.log_level)
    profile = Profile()
    code = await Worker(configured, profile.load).run(stop)
    profile.write(environ["PROFILE_LOG"])
    return code


if __name__ == "__main__":
    process.run(main)
