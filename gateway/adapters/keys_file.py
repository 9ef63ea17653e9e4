"""The API key file: read at start, and again whenever it has changed.

A changed file that can't be used leaves the keys as they were and is named in the log once.
"""

import asyncio
from pathlib import Path

from gateway.core import keys
from gateway.core.keys import KeyRing, KeysError
from servicekit import logs

POLL_S = 1.0


class KeysFile:
    """Holds the ring in force, `current()`. Making one reads the file and raises KeysError."""

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        self._log = logs.get_logger("gateway.keys")
        # The mark is taken before the content, so that a change in between is seen as one.
        self._mark = self._stat()
        self._ring = self._read()

    def current(self) -> KeyRing:
        """The ring in force."""
        return self._ring

    async def run(self) -> None:
        """Follows the file until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Reads the file if it has changed."""
        mark = await asyncio.to_thread(self._stat)
        if mark == self._mark:
            return
        self._mark = mark
        try:
            self._ring = await asyncio.to_thread(self._read)
        except KeysError as error:
            self._log.error("keys_not_reloaded", why=str(error), keys=len(self._ring))
            return
        self._log.info("keys_reloaded", keys=len(self._ring))

    def _stat(self) -> tuple[int, ...]:
        """What changes with the file: also where a link to it is moved."""
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)

    def _read(self) -> KeyRing:
        try:
            with self._path.open("rb") as file:
                data = file.read(keys.MAX_FILE_BYTES + 1)
        except OSError as error:
            raise KeysError(f"can't be read: {error.strerror}") from error
        return keys.parse(data)
