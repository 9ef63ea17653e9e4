"""Records one term of a core to a trace file (QUIRE_TRACE_DIR; off by default).

Files hold prompts: they are created for their owner alone. Bounds: a file ends at max_bytes with a
line that says so, because a later part could not be replayed without the earlier one; the folder
keeps MAX_FILES, the oldest go when a term begins. A file that can't be written ends the recording,
never the term.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from scheduler_svc import trace_file
from scheduler_svc.core import CoreConfig, Ready
from scheduler_svc.core.events import Event
from servicekit.logs import get_logger

MAX_FILES = 16
_log = get_logger("scheduler.trace")


class TraceRecorder:
    """Implements ports.RoundRecorder."""

    def __init__(self, folder: Path, *, epoch: int, config: CoreConfig, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._file: IO[str] | None = None
        self.path = folder / f"scheduler-{epoch:012d}-{os.getpid()}.trace"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for old in sorted(folder.glob("scheduler-*.trace"))[: -(MAX_FILES - 1)]:
                old.unlink(missing_ok=True)
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
            self._file = os.fdopen(os.open(self.path, flags, 0o600), "w", encoding="utf-8")
        except OSError as error:
            _log.error("trace_failed", path=str(self.path), detail=str(error))
            return
        _log.info("trace_begins", path=str(self.path))
        self._write([trace_file.FIRST_LINE, trace_file.config_line(config)])

    def fed(self, events: Iterable[Event]) -> None:
        """Before the core gets them, so that the file shows what it failed on."""
        if self._file is not None:
            self._write(trace_file.event_lines(events))

    def answered(self, ready: Ready) -> None:
        """What the core wants done."""
        if self._file is not None:
            self._write([*trace_file.answer_lines(ready), "."])

    def close(self) -> None:
        """The term is over."""
        self._end(None)

    def _write(self, lines: Iterable[str]) -> None:
        assert self._file is not None
        text = "".join(f"{line}\n" for line in lines)
        self._num_bytes += len(text.encode())
        if self._num_bytes > self._max_bytes:
            _log.warning("trace_full", path=str(self.path), max_bytes=self._max_bytes)
            self._end(f"stopped: the next lines would pass {self._max_bytes} bytes")
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            _log.error("trace_failed", path=str(self.path), detail=str(error))
            self._end(None)

    def _end(self, reason: str | None) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            with file:
                if reason is not None:
                    file.write(f"- {reason}\n")
        except OSError as error:
            _log.error("trace_failed", path=str(self.path), detail=str(error))
