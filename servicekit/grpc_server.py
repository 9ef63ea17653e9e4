"""gRPC servers and channels with the same limits on both ends."""

from collections.abc import Callable, Mapping, Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from servicekit import listening

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_KEEPALIVE = {
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
}
_SERVER_ONLY = {
    "grpc.http2.min_ping_interval_without_data_ms": 5_000,
    "grpc.http2.max_ping_strikes": 0,
    "grpc.max_concurrent_streams": 4096,
    "grpc.so_reuseport": 0,
}


def channel(address: str) -> grpc.aio.Channel:
    """A plaintext channel of its own (streams must not share a broken connection)."""
    options = _KEEPALIVE | {
        "grpc.use_local_subchannel_pool": 1,
        "grpc.enable_http_proxy": 0,
        "grpc.initial_reconnect_backoff_ms": 100,
        # No pause, whatever its name: for so long a try to connect may last, on a busy machine too.
        "grpc.min_reconnect_backoff_ms": 5_000,
        "grpc.max_reconnect_backoff_ms": 1_000,
    }
    return grpc.aio.insecure_channel(address, options=list(options.items()))


class Server:
    """An aio server with standard health and reflection.

    `start` returns the port; `stop` reports NOT_SERVING first, then lets calls end. A port that
    strangers reach has tighter `options` and at most max_calls; more are refused.
    """

    def __init__(
        self,
        register: Callable[[grpc.aio.Server], None],
        service_names: Sequence[str],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        options: Mapping[str, int] | None = None,
        max_calls: int | None = None,
    ) -> None:
        self._server = grpc.aio.server(
            interceptors=list(interceptors),
            options=list((_KEEPALIVE | _SERVER_ONLY | dict(options or {})).items()),
            maximum_concurrent_rpcs=max_calls,
        )
        self._health = health.aio.HealthServicer()
        self._names = ["", *service_names]
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self, host: str, port: int) -> int:
        """Listens; raises OSError naming the address if it can't."""
        try:
            bound = self._server.add_insecure_port(listening.joined(host, port))
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host}:{port}") from error
        if bound == 0:
            raise OSError(f"cannot listen on {host}:{port}")
        await self._server.start()
        return int(bound)

    async def set_serving(self, serving: bool) -> None:
        """Sets the health of every service."""
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Stops; calls still open after the grace are cut."""
        await self.set_serving(False)
        await self._server.stop(grace_s)
