"""python -m benchmarks.gateway.worker: the shipped worker around a step that only waits.

Takes the settings of gpu_worker, and three variables: PACED_STEP_MS, the time from one step's
begin to the next one's (0: as fast as plans come), PACED_TOKEN_ID, the token that every row samples
at every step, and PACED_LOG, a file to which the moment is written at which each token was given to
the streams (see `Published`).
"""

import asyncio
import json
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from structlog.typing import FilteringBoundLogger

from gpu_worker import settings
from gpu_worker.app import Worker
from gpu_worker.messages import TokenBatch
from gpu_worker.ports import (
    CacheGroupSpec,
    ModelRunner,
    Operation,
    RunnerInfo,
    ScheduledRow,
    StepOutput,
)
from gpu_worker.settings import WorkerSettings
from gpu_worker.token_hub import TokenHub
from servicekit import logs, model_files, process

# A batch in the log: time and number of entries, then their ids, first positions and counts.
_HEAD = struct.Struct("<QI")
MAX_BATCHED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Published:
    """Tokens of one request that a step gave: `count` from position `first` on.

    The clock is CLOCK_MONOTONIC, which all processes of a machine share.
    """

    request_id: bytes
    first: int
    count: int
    at_ns: int


def read_log(path: Path) -> Iterator[Published]:
    """What PACED_LOG holds; a batch that is not whole yet is left out."""
    data, at = path.read_bytes(), 0
    while at + _HEAD.size <= len(data):
        at_ns, count = _HEAD.unpack_from(data, at)
        fields = struct.Struct(f"<{'16s' * count}{2 * count}I")
        if at + _HEAD.size + fields.size > len(data):
            return
        values = fields.unpack_from(data, at + _HEAD.size)
        at += _HEAD.size + fields.size
        for i in range(count):
            yield Published(values[i], values[count + i], values[2 * count + i], at_ns)


def open_log(path: str) -> BinaryIO:
    """Unbuffered, so that a reader in another process sees what has been written."""
    return Path(path).open("wb", buffering=0)


class LoggingHub(TokenHub):
    """Notes when tokens are given to it, into `log`; that comes before anything is sent."""

    def __init__(self, log_file: BinaryIO, **of_hub: Any) -> None:
        super().__init__(**of_hub)
        self._file = log_file

    def publish(self, batches: Sequence[tuple[bytes, TokenBatch]]) -> None:
        """See TokenHub."""
        at_ns = time.monotonic_ns()
        super().publish(batches)
        for _, batch in batches:
            # Little work and one write: the streams send when this returns.
            count = len(batch.request_ids)
            columns = struct.pack(f"<{2 * count}I", *batch.first_positions, *batch.num_tokens)
            ids = b"".join(batch.request_ids)
            self._file.write(_HEAD.pack(at_ns, count) + ids + columns)


class PacedRunner:
    """A ModelRunner whose rows all sample `token_id`; its steps begin `step_s` apart.

    A step that comes late does not make up for it: the next one begins a whole step after it.
    """

    def __init__(
        self,
        info: RunnerInfo,
        token_id: int,
        step_s: float,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._info = info
        self._token_id = token_id
        self._step_s = step_s
        self._clock_s = clock_s
        self._sleep = sleep
        self._due_s = 0.0

    @property
    def info(self) -> RunnerInfo:
        """As given."""
        return self._info

    def run(self, rows: Sequence[ScheduledRow]) -> StepOutput:
        """Waits for its turn."""
        now_s = self._clock_s()
        if now_s < self._due_s:
            self._sleep(self._due_s - now_s)
        self._due_s = max(self._due_s, now_s) + self._step_s
        return StepOutput(token_ids=tuple(self._token_id for row in rows if row.samples))

    def begin_operations(self, operations: Sequence[Operation]) -> None:
        """There is no host memory, and prompts of this load share nothing that is copied."""

    def finished_operations(self, *, wait: bool) -> Sequence[int]:
        """None."""
        return ()


def runner_info(configured: WorkerSettings, step_us: float) -> RunnerInfo:
    """Digest and vocabulary are the model folder's, so that the gateway takes this worker."""
    folder = model_files.model_dir(configured.model, weights=False)
    config = json.loads((folder / "config.json").read_text())
    blocks = configured.max_num_seqs * -(-int(config["max_position_embeddings"]) // 16)
    return RunnerInfo(
        model_digest=model_files.model_digest(folder),
        vocab_size=int(config["vocab_size"]),
        max_model_len=int(config["max_position_embeddings"]),
        max_num_seqs=configured.max_num_seqs,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        cache_group=CacheGroupSpec(window=0, block_size=16, block_bytes=1024, num_blocks=blocks),
        step_us=step_us,
        token_us=0.0,
    )


async def main(argv: list[str], environ: dict[str, str], stop: asyncio.Event) -> int:
    """Serves until told to stop."""
    configured = settings.load(argv, environ)
    logs.configure("gpu_worker", configured.log_level)
    step_ms, token_id = float(environ["PACED_STEP_MS"]), int(environ["PACED_TOKEN_ID"])

    def load_runner(of: WorkerSettings, _log: FilteringBoundLogger) -> ModelRunner:
        return PacedRunner(runner_info(of, 1000 * step_ms), token_id, step_ms / 1000)

    with open_log(environ["PACED_LOG"]) as log_file:
        hub = partial(LoggingHub, log_file)
        return await Worker(configured, load_runner, make_hub=hub).run(stop)


if __name__ == "__main__":
    process.run(main)
