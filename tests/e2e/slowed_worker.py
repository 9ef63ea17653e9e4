"""python -m tests.e2e.slowed_worker: the torch-free worker, whose steps a test can slow.

While the file that SLOWED_BY names is there, each step takes as many seconds more as it says, so
that what a test disturbs can't end before it is disturbed.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from gpu_worker import app
from gpu_worker.ports import ModelRunner, ScheduledRow, StepOutput
from gpu_worker.settings import WorkerSettings
from servicekit import process
from tests.stub_worker.__main__ import options_for
from tests.stub_worker.fake_runner import FakeOptions, FakeRunner

VARIABLE = "SLOWED_BY"


class SlowedRunner(FakeRunner):
    """A FakeRunner that looks at the file before each step."""

    def __init__(self, options: FakeOptions, slowed_by: Path) -> None:
        super().__init__(options)
        self._slowed_by = slowed_by

    def run(self, rows: Sequence[ScheduledRow]) -> StepOutput:
        """See FakeRunner."""
        with contextlib.suppress(FileNotFoundError):
            time.sleep(float(self._slowed_by.read_text()))
        return super().run(rows)


async def main(argv: list[str], environ: dict[str, str], stop: asyncio.Event) -> int:
    """A worker with a SlowedRunner."""

    def load_runner(configured: WorkerSettings, log: FilteringBoundLogger) -> ModelRunner:
        return SlowedRunner(options_for(configured, environ), Path(environ[VARIABLE]))

    return await app.main(argv, environ, stop, load_runner)


if __name__ == "__main__":
    process.run(main)
