"""Free ports for one launcher, outside the range from which the kernel serves clients.

A port below that range cannot be taken by an outgoing connection between choosing and listening.
"""

import random

from deploy.local import preflight

LOW, HIGH = 20_000, 32_000
_TRIES = 2_000


class FreePorts:
    """Hands out ports that can be listened on now, none twice."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._given: set[int] = set()
        # Seeded by the system: two launchers must not walk the same row.
        self._random = random.SystemRandom()

    def take(self) -> int:
        """A free port. Raises OSError after a bounded number of tries."""
        for _ in range(_TRIES):
            port = self._random.randrange(LOW, HIGH)
            if port not in self._given and preflight.bindable(self._host, port):
                self._given.add(port)
                return port
        raise OSError(f"no free port between {LOW} and {HIGH} on {self._host}")
