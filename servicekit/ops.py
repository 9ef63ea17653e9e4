"""The ops port of a process: liveness, readiness and metrics, without a key."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

import uvicorn
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from servicekit import listening


class OpsServer:
    """GET /health (the loop turns), /health/ready (`ready()` says so), /metrics."""

    def __init__(self, registry: CollectorRegistry, ready: Callable[[], bool]) -> None:
        async def health(_: Request) -> Response:
            return PlainTextResponse("ok\n")

        async def readiness(_: Request) -> Response:
            good = ready()
            return PlainTextResponse("ready\n" if good else "not ready\n", 200 if good else 503)

        async def metrics(_: Request) -> Response:
            return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

        routes = [
            Route("/health", health),
            Route("/health/ready", readiness),
            Route("/metrics", metrics),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_config=None, access_log=False, lifespan="off"
        )
        tasks = Gauge("quire:event_loop_tasks", "Unfinished asyncio tasks.", registry=registry)
        # Scraped on the loop itself, by the handler above.
        tasks.set_function(lambda: len(asyncio.all_tasks()))
        self._server = uvicorn.Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens and returns the port."""
        listener = listening.listen(host, port)
        bound = int(listener.getsockname()[1])
        self._task = asyncio.get_running_loop().create_task(self._serve(listener))
        return bound

    async def _serve(self, listener: socket.socket) -> None:
        # The process's own handlers stay in charge of signals.
        await self._server._serve([listener])

    async def stop(self) -> None:
        """Stops listening."""
        self._server.should_exit = True
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
