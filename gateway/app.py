"""Composition root: builds everything, runs it, ends it in order."""

import asyncio
import gc
import secrets
import time

import grpc.aio
from quire.oip import open_inference_pb2_grpc
from quire.v1 import inference_pb2_grpc
from redis.exceptions import RedisError

from gateway.adapters import thread_clock
from gateway.adapters.keys_file import KeysFile
from gateway.adapters.queue_redis import RedisQueue
from gateway.adapters.tokenizer_hf import HfTokenizer, ModelFilesError, load_model
from gateway.adapters.tokens_grpc import TokensFleet
from gateway.core.keys import KeysError
from gateway.core.saturation import Saturation
from gateway.core.types import ModelInfo
from gateway.engine import Engine, EngineConfig
from gateway.grpc_auth import KeyInterceptor, tenant
from gateway.grpc_messages import CheckedMessages
from gateway.grpc_service import SERVICE_NAME, InferenceService
from gateway.intake import equally
from gateway.metrics import GatewayMetrics
from gateway.oip_service import SERVICE_NAME as OPEN_INFERENCE
from gateway.oip_service import OpenInferenceService
from gateway.rest.auth import no_keys
from gateway.rest.routes import Rest
from gateway.rest.server import RestServer
from gateway.settings import GatewaySettings
from servicekit import logs, model_files, redis_client
from servicekit.grpc_server import MAX_MESSAGE_BYTES, Server
from servicekit.metrics import new_registry
from servicekit.ops import OpsServer
from servicekit.settings import SettingsError

# After the drain: time for the last frames and cancels to leave.
LAST_WORDS_S = 2
START_RETRY_S = 0.5
# The public gRPC port: calls in all, answers on one connection, bytes of a call's metadata.
MAX_CALLS = 8192
MAX_CALLS_PER_CONNECTION = 1024
MAX_METADATA_BYTES = 16_384
# Of a message. The loop parses it, at worst for some 30 ms per MiB; beside its prompt a request may
# have so much in other fields.
MESSAGE_BYTES, FIELDS_BYTES = 2**20, 2**17
TEXT_BYTES = 6


class Gateway:
    """The process's parts."""

    def __init__(self, settings: GatewaySettings, model: ModelInfo, tokenizer: HfTokenizer) -> None:
        self._settings = settings
        self._log = logs.get_logger("gateway.app")
        gateway_id = secrets.token_hex(8)
        reply_to = secrets.token_bytes(16)
        registry = new_registry()
        self._tokenizer = tokenizer
        self._keys = keys = KeysFile(settings.api_keys_file) if settings.api_keys_file else None
        self.ports: dict[str, int] = {}
        self.queue = RedisQueue(
            redis=redis_client.connect(settings.redis_url),
            blocking=redis_client.connect(settings.redis_url, blocking=True),
            model=model.name,
            gateway_id=gateway_id,
            reply_to=reply_to,
            max_requests=settings.max_queued_requests,
            max_tokens=settings.max_queued_tokens,
        )
        self.fleet = TokensFleet(
            redis=self.queue.redis,
            model=model.name,
            digest=model.digest,
            gateway_id=gateway_id,
            reply_to=reply_to,
            saturated=Saturation(time.monotonic, thread_clock.wanted_s()).seen,
        )
        self.engine = Engine(
            model=model,
            config=EngineConfig(
                default_deadline_s=settings.default_deadline_s,
                stall_s=settings.stall_s,
                stream_buffer_tokens=settings.stream_buffer_tokens,
            ),
            queue=self.queue,
            fleet=self.fleet,
            tokenizer=tokenizer,
            metrics=GatewayMetrics(registry, model.name),
            weight_of=(lambda name: keys.current().weight(name)) if keys is not None else equally,
        )
        self.rest = RestServer(
            Rest(
                self.engine,
                registry,
                settings.max_body_bytes,
                keys.current if keys is not None else no_keys,
            ).app(),
            LAST_WORDS_S,
        )
        self.grpc = Server(
            self._register,
            [SERVICE_NAME, OPEN_INFERENCE],
            [*([KeyInterceptor(keys.current)] if keys is not None else []), CheckedMessages()],
            public_limits(message_bytes(settings.max_grpc_message_bytes, model)),
            MAX_CALLS,
        )
        # Not `engine.ready`: where no worker runs, requests must come in for one to be started.
        self.ops = OpsServer(registry, lambda: not self.engine.draining)
        self._log = self._log.bind(gateway_id=gateway_id)

    def _register(self, server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceService(self.engine, tenant),  # type: ignore[no-untyped-call]
            server,
        )
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
            OpenInferenceService(self.engine),  # type: ignore[no-untyped-call]
            server,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop`, then drains. Raises OSError if a port is taken."""
        if self._keys is None:
            self._log.warning("no_api_keys", serves="this machine only, JSON with a local Host")
        else:
            self._log.info("keys_loaded", keys=len(self._keys.current()))
        host = self._settings.host
        listener = self.rest.listen(host, self._settings.port)
        self._listening("rest", int(listener.getsockname()[1]))
        self._listening("grpc", await self.grpc.start(host, self._settings.grpc_port))
        self._listening("ops", await self.ops.start(host, self._settings.ops_port))
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.fleet.run(self.engine)),
                group.create_task(self.engine.run()),
            ]
            if self._keys is not None:
                tasks.append(group.create_task(self._keys.run()))
            server = group.create_task(self.rest.serve(listener))
            await self._wait_for_redis(stop)
            if not stop.is_set():
                tasks.append(group.create_task(self.queue.run(self.engine.on_notice)))
                await self.grpc.set_serving(True)
                self._log.info("ready")
            await _first(stop, server)
            await self._drain(server)
            for task in tasks:
                task.cancel()
        await self.ops.stop()
        await self.queue.close()
        self._tokenizer.close()

    async def _wait_for_redis(self, stop: asyncio.Event) -> None:
        told = False
        while not stop.is_set():
            try:
                await self.queue.start()
                return
            except (RedisError, OSError, TimeoutError) as error:
                if not told:
                    told = True
                    self._log.warning("waiting_for_redis", error=type(error).__name__)
                await asyncio.sleep(START_RETRY_S)

    async def _drain(self, server: asyncio.Task[None]) -> None:
        self._log.info("draining", streams=self.engine.num_live, drain_s=self._settings.drain_s)
        self.engine.draining = True
        self.rest.drain()
        async with asyncio.TaskGroup() as group:
            # Tells gRPC clients at once to go elsewhere; running calls go on. One that never ends,
            # as a watch of the health, does not hold the process: the shorter grace counts.
            group.create_task(self.grpc.stop(self._settings.drain_s + LAST_WORDS_S))
            await self.engine.drain(self._settings.drain_s)
            await self.queue.flush(LAST_WORDS_S)
            self.rest.stop()
            await self.grpc.stop(LAST_WORDS_S)
        await server
        self._log.info("drained")

    def _listening(self, what: str, port: int) -> None:
        self.ports[what] = port
        self._log.info("listening", what=what, port=port, host=self._settings.host)


def message_bytes(wanted: int, model: ModelInfo) -> int:
    """The bound of a gRPC message; where none is wanted, the longest prompt fits.

    In token ids, and as a text of TEXT_BYTES for each of its tokens.
    """
    id_bytes = -(-model.vocab_size.bit_length() // 7)
    longest = model.max_model_len * max(id_bytes, TEXT_BYTES) + FIELDS_BYTES
    return wanted or min(max(MESSAGE_BYTES, longest), MAX_MESSAGE_BYTES)


def public_limits(max_message_bytes: int) -> dict[str, int]:
    """What a client may ask of the public gRPC port, and how often it may ping."""
    return {
        "grpc.max_receive_message_length": max_message_bytes,
        "grpc.max_concurrent_streams": MAX_CALLS_PER_CONNECTION,
        "grpc.max_metadata_size": MAX_METADATA_BYTES,
        "grpc.absolute_max_metadata_size": MAX_METADATA_BYTES,
        "grpc.http2.max_ping_strikes": 2,
    }


async def _first(stop: asyncio.Event, server: asyncio.Task[None]) -> None:
    """Waits for the order to stop, or the REST server's unexpected end."""
    waiting = asyncio.get_running_loop().create_task(stop.wait())
    try:
        await asyncio.wait([waiting, server], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> int:
    """The whole life of the process; the exit code."""
    log = logs.get_logger("gateway.app")
    try:
        folder = await asyncio.to_thread(model_files.model_dir, settings.model, weights=False)
        name = model_files.served_name(settings.served_model_name, settings.model)
        model, tokenizer = await asyncio.to_thread(
            lambda: load_model(
                folder,
                name=name,
                max_model_len=settings.max_model_len,
                threads=settings.tokenizer_threads,
            )
        )
    except (ModelFilesError, OSError, ValueError) as error:
        log.error("model_not_loaded", setting="QUIRE_MODEL", why=str(error))
        return 1
    log.info(
        "model_loaded",
        model=name,
        digest=model.digest[:16],
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
    )
    try:
        gateway = Gateway(settings, model, tokenizer)
    except KeysError as error:
        raise SettingsError(f"QUIRE_API_KEYS_FILE: {error}") from error
    # What is there now stays: to look through it for garbage again and again would hold the loop.
    gc.collect()
    gc.freeze()
    code = 0
    try:
        await gateway.run(stop)
    except* OSError as group:
        log.error("cannot_listen", why=str(group.exceptions[0]))
        code = 1
    except* RuntimeError as group:
        log.error("cannot_start", why=str(group.exceptions[0]))
        code = 1
    return code
