"""One worker: dials it, keeps one session with it, resumes a broken one, says when it is lost.

A life begins with WorkerJoined, once no step of an older life runs on the worker, and ends with
WorkerLost; in between the core may plan, and a broken stream is resumed: the worker says how far it
got, and the rest is sent again. Only `run` and the sessions it awaits begin and end lives, so their
events are in order with the results'.

Bounds: unreturned plans are bounded by the core (max_inflight_steps); reading stops while the event
queue is full, and gRPC's flow control stops the worker.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from scheduler_svc import codec, limits
from scheduler_svc.adapters.loss_rules import MAX_PATIENCE, WorkerHealth
from scheduler_svc.adapters.refusals import Refusals, RefusedError
from scheduler_svc.adapters.worker_life import (
    CannotResumeError,
    LinkError,
    ProtocolError,
    WorkerLife,
)
from scheduler_svc.core.events import (
    RequestCancelled,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerSubscribed,
)
from scheduler_svc.core.ready import StepPlan
from scheduler_svc.core.types import RequestId, WorkerId
from scheduler_svc.ports import (
    Cancels,
    Clock,
    Draining,
    EventSink,
    Heartbeat,
    Hello,
    LinkObserver,
    Refused,
    SnapshotChunk,
    StepReport,
    Subscriptions,
    WorkerMessage,
    WorkerRecord,
)
from servicekit import grpc_server
from servicekit.logs import get_logger

METHOD = "/quire.v1.WorkerService/Session"
HELLO_TIMEOUT_S = 2.0
SNAPSHOT_TIMEOUT_S = 10.0
SILENT_TIMEOUT_S = 2.0
MAX_SNAPSHOT_REQUESTS = 1_000_000
RESUME_PAUSE_S = 0.05
DIAL_PAUSE_S = 0.5
GIVEN_UP_PAUSE_S = 5.0
_MAX_DEAD_INCARNATIONS = 8
_MAX_LOGGED_FAULTS = 16

_SESSION_ERRORS = (
    LinkError,
    grpc.aio.AioRpcError,
    grpc.aio.BaseError,
    asyncio.InvalidStateError,  # grpc.aio raises it for a write on a stream that has ended
    codec.MalformedError,
    TimeoutError,
)
_BREACHES = (ProtocolError, codec.MalformedError)

Call = grpc.aio.StreamStreamCall[bytes, bytes]
Dial = Callable[[str], grpc.aio.Channel]


class WorkerLink:
    """See the module."""

    def __init__(
        self,
        record: WorkerRecord,
        *,
        refusals: Refusals,
        grace_ns: int,
        clock: Clock,
        sink: EventSink,
        observer: LinkObserver,
        check_digest: Callable[[WorkerId, str], None],
        dial: Dial = grpc_server.channel,
    ) -> None:
        self.worker_id = record.worker_id
        self._record: WorkerRecord | None = record
        self._address = record.address
        self._epoch = refusals.epoch
        self._grace_ns = grace_ns
        self._clock = clock
        self._sink = sink
        self._observer = observer
        self._check_digest = check_digest
        self._dial = dial
        self._log = get_logger("scheduler.worker").bind(worker=record.worker_id)
        self._refusals = refusals
        self._life: WorkerLife | None = None
        self._ending: str | None = None
        self._session: asyncio.Task[None] | None = None
        self._outgoing: deque[bytes] = deque()
        self._writer: asyncio.Future[None] | None = None
        self._kick = asyncio.Event()
        self._pause_s = 0.0
        self._cool_off = False
        self._last_error = ""
        self._dead: deque[int] = deque(maxlen=_MAX_DEAD_INCARNATIONS)
        self._last_incarnation = 0
        self._patience = 1

    # Called by the manager and the driver; none of these waits

    @property
    def address(self) -> str:
        """Where it was last dialled."""
        return self._address

    @property
    def gateway_ids(self) -> frozenset[str]:
        """Gateways that read its tokens."""
        return self._life.gateway_ids if self._life else frozenset()

    @property
    def claimed_epoch(self) -> int:
        """See Refusals."""
        return self._refusals.claimed_epoch

    def announced(self, record: WorkerRecord | None) -> None:
        """The registry's word; None if the worker is not in it."""
        if record is not None and record.incarnation in self._dead:
            return
        self._record = record
        life = self._life
        if record is not None and life is not None and record.incarnation != life.incarnation:
            self._dead.append(life.incarnation)
            self._end_life("the registry names another incarnation")
        elif record is None and life is None:
            self._kick.set()

    def send(self, plan: StepPlan) -> None:
        """Hands a plan to the session. Without a life, or before its reset, it is dropped."""
        life = self._life
        if life is None or self._ending is not None:
            return
        raw = life.plan(plan, self._clock.now_ns())
        if raw is None:
            return
        self._outgoing.append(raw)
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)
        self._observer.plan_sent(len(raw))

    def give_up(self, reason: str) -> None:
        """The core has given the worker up: it knows of the loss."""
        self._cool_off = True
        self._end_life(f"the core gave it up: {reason}")

    def check(self, now_ns: int) -> None:
        """Applies the loss rules."""
        if self._life is None or self._ending is not None:
            return
        verdict = self._life.health.check(now_ns)
        if verdict is None:
            return
        if verdict.lost:
            if verdict.stuck:
                self._patience = min(2 * self._patience, MAX_PATIENCE)
            self._end_life(verdict.reason)
        elif self._session is not None:
            self._log.info("session_cut", reason=verdict.reason)
            self._session.cancel()

    def _end_life(self, reason: str) -> None:
        if self._life is not None and self._ending is None:
            self._ending = reason
            self._kick.set()
            if self._session not in (None, asyncio.current_task()):
                self._session.cancel()

    # The link's task

    async def run(self) -> None:
        """Serves until the worker has no life and is not in the registry."""
        while self._record is not None or self._life is not None:
            if self._ending is None:
                await self._serve_once()
            if self._ending is not None:
                await self._lose()
            await self._pause()

    async def _serve_once(self) -> None:
        session = asyncio.get_running_loop().create_task(self._serve())
        self._session = session
        try:
            await asyncio.wait({session})
        finally:
            self._session = None
            session.cancel()
            await asyncio.wait({session})
        if self._life is not None:
            self._life.health.stream_broken(self._clock.now_ns())
        if session.cancelled():
            self._pause_s = 0.0
            return
        error = session.exception()
        if isinstance(error, _SESSION_ERRORS):
            self._session_failed(error)
        elif error is not None:
            raise error

    def _session_failed(self, error: BaseException) -> None:
        detail = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        detail = f"{type(error).__name__}: {detail or 'no answer'}"[:200]
        if self._life is not None or detail != self._last_error:
            self._last_error = detail
            self._log.info("session_failed", detail=detail, joined=self._life is not None)
        self._pause_s = RESUME_PAUSE_S if self._life is not None else DIAL_PAUSE_S
        if self._life is not None and self._life.draining:
            self._end_life("it has left")
        elif self._life is not None and isinstance(error, RefusedError):
            self._cool_off = True
            self._end_life(str(error))
        elif self._life is not None and isinstance(error, _BREACHES) and self._life.breached():
            self._cool_off = True
            self._end_life("it broke the protocol")

    async def _lose(self) -> None:
        life, reason = self._life, self._ending
        assert life is not None
        self._life = None
        self._ending = None
        self._outgoing.clear()
        self._log.warning("worker_lost", reason=reason, incarnation=life.incarnation)
        self._observer.worker_lost()
        if self._cool_off:
            self._pause_s, self._cool_off = GIVEN_UP_PAUSE_S, False
        await self._sink.put(WorkerLost(now_ns=self._clock.now_ns(), worker_id=self.worker_id))

    async def _pause(self) -> None:
        seconds, self._pause_s = self._pause_s, DIAL_PAUSE_S
        self._kick.clear()
        if seconds <= 0 or self._ending is not None:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._kick.wait()
        except TimeoutError:
            pass

    # One session

    async def _serve(self) -> None:
        if self._record is not None:
            self._address = self._record.address
        async with self._dial(self._address) as channel:
            method: Any = channel.stream_stream(METHOD)
            call: Call = method()
            life = self._life
            opening = codec.encode_open(
                epoch=self._epoch,
                last_result_step=life.last_result_step if life else 0,
                incarnation=life.incarnation if life else 0,
            )
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await call.write(opening)
                hello = await self._read_hello(call)
            if life is not None:
                self._resume(life, hello)
            else:
                life = await self._join(call, hello)
            await self._exchange(call, life)

    async def _read_hello(self, call: Call) -> Hello:
        message = await _read(call)
        if isinstance(message, Refused):
            raise self._refusals.refused(message.highest_epoch, self._clock.now_ns())
        if not isinstance(message, Hello):
            raise ProtocolError("the first message is no Hello")
        self._refusals.accepted()
        if not (
            message.min_schema_revision <= codec.SCHEMA_REVISION <= message.max_schema_revision
        ):
            self._log.error(
                "schema_revisions_differ",
                worker_speaks=[message.min_schema_revision, message.max_schema_revision],
                scheduler_speaks=codec.SCHEMA_REVISION,
            )
            raise LinkError("no common schema revision")
        if message.worker_id != self.worker_id:
            raise LinkError(f"the worker there is {message.worker_id!r}")
        return message

    def _resume(self, life: WorkerLife, hello: Hello) -> None:
        """The worker is the same and has all that is needed, or its life ends."""
        try:
            again = life.resume(hello)
        except CannotResumeError as error:
            if hello.incarnation != life.incarnation:
                self._dead.append(life.incarnation)
            self._end_life(str(error))
            raise LinkError(str(error)) from error
        self._outgoing.clear()
        self._outgoing.extend(again)
        life.health.stream_open(self._clock.now_ns())
        self._log.info("session_resumed", resent=len(again))

    async def _join(self, call: Call, hello: Hello) -> WorkerLife:
        attempts: dict[RequestId, int] = {}
        gateway_ids: set[str] = set()
        async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
            while True:
                chunk = await _read(call)
                if isinstance(chunk, Heartbeat) or chunk is None:
                    continue
                if not isinstance(chunk, SnapshotChunk):
                    raise ProtocolError(f"{type(chunk).__name__} before the snapshot's end")
                attempts.update(chunk.attempts)
                gateway_ids |= chunk.gateway_ids
                if len(attempts) > MAX_SNAPSHOT_REQUESTS or len(gateway_ids) > limits.MAX_GATEWAYS:
                    raise ProtocolError("the snapshot is too long")
                if chunk.last:
                    break
        whole, draining = await self._until_free(call, frozenset(gateway_ids))
        if self._record is not None and self._record.incarnation != hello.incarnation:
            self._dead.append(self._record.incarnation)
        self._check_digest(self.worker_id, hello.model_digest)
        if hello.incarnation != self._last_incarnation:
            self._last_incarnation, self._patience = hello.incarnation, 1
        now_ns = self._clock.now_ns()
        life = WorkerLife(
            worker_id=self.worker_id,
            epoch=self._epoch,
            incarnation=hello.incarnation,
            health=WorkerHealth(
                cost=hello.cost,
                grace_ns=self._grace_ns,
                now_ns=now_ns,
                patience=self._patience,
            ),
            gateway_ids=whole,
        )
        event = WorkerJoined(
            now_ns=now_ns,
            worker_id=self.worker_id,
            capacity=hello.capacity,
            cost=hello.cost,
            gateway_ids=life.gateway_ids,
            snapshot_attempts=attempts,
        )
        await self._sink.put(event)
        self._life = life
        self._last_error = ""
        self._log.info("worker_joined", address=self._address, incarnation=hello.incarnation)
        if draining:
            await self._drains(life, now_ns)
        return life

    async def _until_free(
        self, call: Call, gateway_ids: frozenset[str]
    ) -> tuple[frozenset[str], bool]:
        """Reads on until no step of an older life runs; work given earlier would wait behind it.

        A worker whose step never ends is alive but never joins. Returns its gateways and whether it
        is draining.
        """
        draining = waits = False
        while True:
            async with asyncio.timeout(SILENT_TIMEOUT_S):
                message = await _read(call)
            match message:
                case Heartbeat(busy=False):
                    return gateway_ids, draining
                case Heartbeat():
                    if not waits:
                        self._log.info("worker_busy", last_step=message.last_step)
                    waits = True
                case Subscriptions():
                    gateway_ids = message.gateway_ids
                case Cancels():
                    await self._cancelled(message, self._clock.now_ns())
                case Draining():
                    draining = True
                case StepReport() | None:
                    pass  # of an older life
                case _:
                    raise ProtocolError(f"{type(message).__name__} out of place")

    async def _exchange(self, call: Call, life: WorkerLife) -> None:
        writer = asyncio.get_running_loop().create_task(self._write_plans(call))
        try:
            while True:
                message = await _read(call)
                now_ns = self._clock.now_ns()
                life.health.heard(now_ns)
                if isinstance(message, StepReport):
                    await self._take_result(life, message, now_ns)
                else:
                    await self._take_other(life, message, now_ns)
        finally:
            writer.cancel()
            await asyncio.wait({writer})
            if not writer.cancelled() and (bug := writer.exception()) is not None:
                raise bug

    async def _write_plans(self, call: Call) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                while self._outgoing:
                    await call.write(self._outgoing.popleft())
                self._writer = loop.create_future()
                await self._writer
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader learns it too, and what is unreturned goes out again
        finally:
            self._writer = None

    async def _take_result(self, life: WorkerLife, report: StepReport, now_ns: int) -> None:
        event = life.event(report, now_ns)
        if event is None:
            self._observer.stale_result()
            return
        await self._sink.put(event)
        lag_ns = life.returned(now_ns)  # not before: a session cut while it waits asks again
        self._observer.step_returned(lag_ns / 1e9, report.idle_us)
        for fault in report.faults[:_MAX_LOGGED_FAULTS]:
            self._log.warning(
                "fault",
                step=report.step,
                scope=fault.scope.name,
                code=fault.code,
                slot=fault.slot,
                detail=fault.message,
            )
        if any(fault.digest_mismatch for fault in report.faults):
            self._observer.digest_mismatch()

    async def _take_other(
        self, life: WorkerLife, message: WorkerMessage | None, now_ns: int
    ) -> None:
        match message:
            case Heartbeat() | None:
                pass
            case Cancels():
                await self._cancelled(message, now_ns)
            case Subscriptions():
                await self._subscribed(life, message.gateway_ids, now_ns)
            case SnapshotChunk():  # after a resync only the gateways can be new
                gateway_ids = life.snapshot_gateways(message)
                if gateway_ids is not None:
                    await self._subscribed(life, gateway_ids, now_ns)
            case Draining():
                await self._drains(life, now_ns)
            case Refused():
                raise self._refusals.refused(message.highest_epoch, now_ns)
            case Hello() | StepReport():
                raise ProtocolError(f"{type(message).__name__} out of place")

    async def _cancelled(self, cancels: Cancels, now_ns: int) -> None:
        for request_id in cancels.request_ids:
            await self._sink.put(RequestCancelled(now_ns=now_ns, request_id=request_id))

    async def _drains(self, life: WorkerLife, now_ns: int) -> None:
        if not life.draining:
            life.draining = True
            self._log.info("worker_draining")
            await self._sink.put(WorkerDraining(now_ns=now_ns, worker_id=self.worker_id))

    async def _subscribed(self, life: WorkerLife, gateway_ids: frozenset[str], now_ns: int) -> None:
        if gateway_ids != life.gateway_ids:
            life.gateway_ids = gateway_ids
            event = WorkerSubscribed(
                now_ns=now_ns, worker_id=self.worker_id, gateway_ids=gateway_ids
            )
            await self._sink.put(event)


async def _read(call: Call) -> WorkerMessage | None:
    raw = await call.read()
    if raw is grpc.aio.EOF:
        raise LinkError(f"the worker ended the stream: {await call.details() or 'no reason'}")
    assert isinstance(raw, bytes)
    return codec.decode_worker_message(raw)
