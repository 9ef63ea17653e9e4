"""python -m gpu_worker: a worker with the real model."""

import asyncio

from structlog.typing import FilteringBoundLogger

from gpu_worker import app
from gpu_worker.ports import ModelRunner
from gpu_worker.settings import WorkerSettings
from servicekit import process


def _load_runner(configured: WorkerSettings, log: FilteringBoundLogger) -> ModelRunner:
    # Here, not above: --help and a bad setting must not pay for importing torch.
    from gpu_worker.runner import load_runner

    return load_runner(configured, log)


async def _main(argv: list[str], environ: dict[str, str], stop: asyncio.Event) -> int:
    return await app.main(argv, environ, stop, _load_runner)


if __name__ == "__main__":
    process.run(_main)
