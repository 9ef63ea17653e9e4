"""Workers that end with their test."""

import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from gpu_worker.ports import ScheduledRow, StepOutput
from tests.integration.worker.bench import OPTIONS, Bench, MakeBench
from tests.stub_worker.fake_runner import FakeRunner


@pytest.fixture
async def make_bench() -> AsyncIterator[MakeBench]:
    benches: list[Bench] = []

    async def make(environ: dict[str, str] | None = None, **options: Any) -> Bench:
        bench = Bench(dataclasses.replace(OPTIONS, **options), environ or {})
        benches.append(bench)
        await bench.start()
        return bench

    yield make
    for bench in benches:
        await bench.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Steps begin and are not computed until it is set."""
    is_open, run = threading.Event(), FakeRunner.run

    def run_behind(runner: FakeRunner, rows: Sequence[ScheduledRow]) -> StepOutput:
        is_open.wait()
        return run(runner, rows)

    monkeypatch.setattr(FakeRunner, "run", run_behind)
    yield is_open
    is_open.set()
