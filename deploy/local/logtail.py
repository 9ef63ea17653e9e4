"""Follows one child's log file: what is worth showing, and a bound on the file's size.

Children write JSON lines, one event each; other lines (a traceback, a library's print) are kept in
the file and shown only when the child dies.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READ_BYTES = 256 * 1024
ROTATE_BYTES = 64 * 1024 * 1024
SHOWN_LINES = 5
_LOUD = {"warning", "error", "critical"}
_PLAIN = ("event", "level", "timestamp", "service", "logger", "exception")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event of a child."""

    event: str
    level: str
    fields: dict[str, Any]

    @property
    def loud(self) -> bool:
        """Whether it is echoed on the launcher's own output."""
        return self.level in _LOUD

    def __str__(self) -> str:
        rest = " ".join(f"{k}={v}" for k, v in self.fields.items() if k not in _PLAIN)
        return f"{self.level}: {self.event} {rest}".rstrip()[:400]


def parse(line: bytes) -> Entry | None:
    """The event of a JSON line, or None."""
    if not line.startswith(b"{"):
        return None
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        return None
    return Entry(event=fields["event"], level=str(fields.get("level", "")), fields=fields)


class LogTail:
    """Reads what was appended since the last call, at most READ_BYTES of it.

    A writer faster than that is followed at its end; the file itself loses nothing until it reaches
    ROTATE_BYTES, when it is moved to `NAME.1` and begun anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def entries(self) -> list[Entry]:
        """New events in order."""
        try:
            size = self.path.stat().st_size
            if size < self._offset:
                self._offset, self._rest = 0, b""
            if size - self._offset > READ_BYTES:
                self._offset, self._rest = size - READ_BYTES, b""
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(READ_BYTES)
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-READ_BYTES:]
        if size > ROTATE_BYTES:
            self._rotate()
        return [entry for line in lines if (entry := parse(line)) is not None]

    def _rotate(self) -> None:
        # The child holds the file open in append mode, so it goes on at the new end.
        shutil.copyfile(self.path, self.path.with_name(self.path.name + ".1"))
        os.truncate(self.path, 0)
        self._offset, self._rest = 0, b""
