"""Start and end of a service process."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable

from servicekit.settings import SettingsError


def run(main: Callable[[list[str], dict[str, str], asyncio.Event], Awaitable[int]]) -> None:
    """Runs `main(argv, environ, stop)` and exits with its result.

    `stop` is set by SIGTERM or SIGINT; a second signal ends the process at once. Bad settings end
    it with status 2 and one line on standard error.
    """
    if not __debug__:
        sys.exit("Quire does not run under -O: its assertions guard shared state")

    async def body() -> int:
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():
                os._exit(130)
            stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        return await main(sys.argv[1:], dict(os.environ), stop)

    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    try:
        with runner:
            code = runner.run(body())
        # Taking the interpreter apart takes seconds where a model has been loaded, and all that
        # had to be ended in order has been.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    except SettingsError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
