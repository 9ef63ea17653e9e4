"""Workers that end with their test."""

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.worker.bench import OPTIONS, Bench, MakeBench


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
