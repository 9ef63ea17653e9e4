"""python -m tests.stub_worker: takes the settings of gpu_worker, and STUB_* for the fake.

Sizes that gpu_worker's settings name come from there; vocabulary and digest from the model folder
of QUIRE_MODEL where there is one, so that a gateway with that model accepts the worker.
"""

import asyncio
import json
from collections.abc import Mapping

from structlog.typing import FilteringBoundLogger

from gpu_worker import app
from gpu_worker.ports import ModelRunner
from gpu_worker.settings import WorkerSettings
from servicekit import model_files, process
from tests.stub_worker.fake_runner import BLOCK_BYTES, FakeOptions, FakeRunner


def options_for(configured: WorkerSettings, environ: Mapping[str, str]) -> FakeOptions:
    """STUB_* over settings over the model folder over the fake's defaults."""
    values: dict[str, object] = {"block_size": configured.block_size}
    values["max_num_seqs"] = configured.max_num_seqs
    if configured.swap_space_gib >= 0:
        values["num_host_blocks"] = int(configured.swap_space_gib * 2**30) // BLOCK_BYTES
    try:
        folder = model_files.model_dir(configured.model, weights=False)
    except OSError:
        pass
    else:
        values["model_digest"] = model_files.model_digest(folder)
        values["vocab_size"] = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    for name, value in (
        ("max_model_len", configured.max_model_len),
        ("num_blocks", configured.num_gpu_blocks_override),
        ("max_num_batched_tokens", configured.max_num_batched_tokens),
    ):
        if value:
            values[name] = value
    return FakeOptions.from_environ(environ, **values)


async def main(argv: list[str], environ: dict[str, str], stop: asyncio.Event) -> int:
    """A worker with a FakeRunner."""

    def load_runner(configured: WorkerSettings, log: FilteringBoundLogger) -> ModelRunner:
        options = options_for(configured, environ)
        log.info("stub runner", options=repr(options))
        return FakeRunner(options)

    return await app.main(argv, environ, stop, load_runner)


if __name__ == "__main__":
    process.run(main)
