"""Streams between simulated processes, and how they break.

Modelled: what gRPC does with a bidirectional stream. Messages are bytes on the way; a direction
keeps its order; a stream ends with a status, by its server, its client, or because the link under
it is gone. Ways in which a link fails:

    reset    its streams break at once on both sides, dialling fails until it is healed
    silent   nothing passes in either direction; it comes later, when the link is healed

and single messages of a stream can be lost, repeated or late, once each, by `Network.tamper`.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import grpc
import grpc.aio

from scheduler_svc.sim.loop import Process, VirtualLoop, current_process

DIAL_S = 0.02
Handler = Callable[[AsyncIterator[Any], Any], Awaitable[None]]
# (path, bytes to the client) -> bytes to deliver now, each with the seconds it is late.
Tamper = Callable[[str, bytes], list[tuple[bytes, float]]]


class Method:
    """What a server does with a stream."""

    def __init__(self, handler: Handler, decode: Callable[[bytes], Any]) -> None:
        self.handler = handler
        self.decode = decode


class Link:
    """Between two processes, by their names. A cut that ends leaves the others."""

    def __init__(self) -> None:
        self.num_resets = 0
        self.num_silences = 0
        self.num_held = 0
        self.held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def down(self) -> bool:
        """Streams break, dialling fails."""
        return self.num_resets > 0

    @property
    def silent(self) -> bool:
        """Nothing passes."""
        return self.num_silences > 0

    def hold(self, function: Callable[..., None], *args: Any) -> None:
        """It comes when nothing is silent any more."""
        self.num_held += 1
        self.held.append((function, args))


class _Pipe:
    """One direction of a stream."""

    def __init__(self, network: "Network", link: Link) -> None:
        self._network = network
        self._link = link
        self._arrived: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._due_s = 0.0

    def send(self, raw: bytes, late_s: float = 0.0) -> None:
        """It arrives after all that was sent before."""
        loop = self._network.loop
        self._due_s = max(self._due_s, loop.time() + self._network.latency_s() + late_s)
        loop.call_at(self._due_s, self._arrive, raw, context=self._network.context)

    def _arrive(self, raw: bytes) -> None:
        if self._link.silent:
            self._link.hold(self._arrive, raw)
            return
        self._arrived.append(raw)
        self.wake()

    def wake(self) -> None:
        """The reader looks again."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def take(self) -> bytes | None:
        """The next message that has arrived."""
        return self._arrived.popleft() if self._arrived else None

    async def news(self) -> None:
        """Returns when there may be something."""
        self._reader = self._network.loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None


class _Call:
    """A stream as its client holds it: grpc.aio.StreamStreamCall as far as Quire uses it."""

    def __init__(
        self, channel: "SimChannel", path: str, encode: Any, decode: Any, link: Link
    ) -> None:
        self._network = channel.network
        self._channel = channel
        self._path = path
        self._encode = encode or bytes
        self._decode = decode or bytes
        self.link = link
        self.to_server = _Pipe(self._network, link)
        self.to_client = _Pipe(self._network, link)
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._serving: asyncio.Task[Any] | None = None
        self._number = next(self._network.numbers)
        self._network.calls[self._number] = self

    @property
    def over(self) -> bool:
        """The client has its status."""
        return self._status is not None

    # The client's side

    async def write(self, message: Any) -> None:
        """Raises AioRpcError when the stream has broken."""
        if self._status is not None:
            raise self._error()
        self.to_server.send(self._encode(message))

    async def read(self) -> Any:
        """The next message; EOF at an orderly end. Raises AioRpcError."""
        while True:
            raw = self.to_client.take()
            if raw is not None:
                return self._decode(raw)
            if self._status is not None:
                if self._status[0] is grpc.StatusCode.OK:
                    return grpc.aio.EOF
                raise self._error()
            await self.to_client.news()

    async def details(self) -> str:
        """Of the status."""
        return self._status[1] if self._status else ""

    def cancel(self) -> bool:
        """The client goes."""
        if self._status is None:
            self.end(grpc.StatusCode.CANCELLED, "cancelled")
            self._pass_on(self._stop_serving)
        return True

    def _error(self) -> Exception:
        assert self._status is not None
        empty = grpc.aio.Metadata()
        return grpc.aio.AioRpcError(self._status[0], empty, empty, details=self._status[1])

    # The network's and the server's side

    def open(self, method: Method, process: Process) -> None:
        """The server learns of it."""
        if self._status is None and not process.dead:
            self._serving = process.start(self._serve(method))

    async def _serve(self, method: Method) -> None:
        context = _Context(self)
        status = grpc.StatusCode.OK, ""
        try:
            await method.handler(_Requests(self.to_server, method.decode), context)
        except grpc.aio.AbortError:
            status = context.status
        except asyncio.CancelledError:
            return
        except Exception as error:
            self._network.loop.fail(error)
            return
        self._pass_on(self.end, *status)

    def write_to_client(self, raw: bytes) -> None:
        """What the server sends, as far as nobody tampers with it."""
        for part, late_s in self._network.tampered(self._channel, self._path, raw):
            self.to_client.send(part, late_s)

    def _pass_on(self, function: Callable[..., None], *args: Any) -> None:
        """To the other side, after what was sent before; not at all over a dead link."""
        if self.link.silent:
            self.link.hold(function, *args)
        else:
            loop, network = self._network.loop, self._network
            when_s = max(self.to_client._due_s, loop.time() + network.latency_s())
            loop.call_at(when_s, function, *args, context=network.context)

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """The client gets its status, unless it has one."""
        if self._status is None:
            self._status = code, details
            self._network.calls.pop(self._number, None)
            self.to_client.wake()

    def _stop_serving(self) -> None:
        if self._serving is not None:
            self._serving.cancel()

    def break_off(self, details: str) -> None:
        """Both sides learn that the connection is gone."""
        self.end(grpc.StatusCode.UNAVAILABLE, details)
        self._stop_serving()


class _Requests:
    """What a servicer reads from."""

    def __init__(self, pipe: _Pipe, decode: Callable[[bytes], Any]) -> None:
        self._pipe = pipe
        self._decode = decode

    def __aiter__(self) -> "_Requests":
        return self

    async def __anext__(self) -> Any:
        while True:
            raw = self._pipe.take()
            if raw is not None:
                return self._decode(raw)
            await self._pipe.news()


class _Context:
    """grpc.aio.ServicerContext as far as Quire uses it."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self.status = grpc.StatusCode.UNKNOWN, ""

    async def write(self, message: Any) -> None:
        """Sends a message, if anybody is there."""
        if not self._call.over:
            self._call.write_to_client(message.SerializeToString())

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        """Ends the stream with a status."""
        self.status = code, details
        raise grpc.aio.AbortError


class SimChannel:
    """grpc.aio.Channel as far as Quire uses it. `client` and `server` are processes' names."""

    def __init__(self, network: "Network", client: str, address: str) -> None:
        self.network = network
        self.client = client
        self.server = address
        self._calls: list[_Call] = []

    async def __aenter__(self) -> "SimChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        for call in self._calls:
            call.cancel()

    def stream_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        **_: Any,
    ) -> Callable[..., _Call]:
        """A stream's opener."""

        def dial(*_: Any, **__: Any) -> _Call:
            link = self.network.link(self.client, self.server)
            call = _Call(self, method, request_serializer, response_deserializer, link)
            self._calls = [*(c for c in self._calls if not c.over), call]
            self.network.dialled(call, self.server, method)
            return call

        return dial

    def unary_unary(self, *_: Any, **__: Any) -> None:
        """Stubs name such methods; nothing calls them."""


class Network:
    """All links. What is on its way belongs to no process. A servicer that raises is a bug."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self.loop = loop
        self.context = Process(loop, "network").context
        self.numbers = itertools.count(1)
        self.calls: dict[int, _Call] = {}
        self._random = random
        self._links: dict[tuple[str, str], Link] = {}
        self._servers: dict[str, tuple[Process, dict[str, Method]]] = {}
        self._tampers: dict[str, list[Tamper]] = {}

    def latency_s(self) -> float:
        """0.2 to 1 ms, mostly."""
        return 0.0002 + 0.0008 * self._random.random() ** 3

    def link(self, one: str, other: str) -> Link:
        """There is one between any two."""
        key = (one, other) if one < other else (other, one)
        return self._links.setdefault(key, Link())

    def listen(self, address: str, process: Process, methods: dict[str, Method]) -> None:
        """From now on streams to the address reach this process."""
        self._servers[address] = process, methods

    def dial(self, client: str) -> Callable[[str], Any]:
        """How a process gets its channels."""
        return lambda address: SimChannel(self, client, address)

    def dialled(self, call: _Call, address: str, path: str) -> None:
        """A client has opened a stream."""
        assert current_process() is not None, "only processes dial"
        self.loop.call_later(self.latency_s(), self._connect, call, address, path,
                             context=self.context)  # fmt: skip

    def _connect(self, call: _Call, address: str, path: str) -> None:
        if call.link.silent:
            call.link.hold(self._connect, call, address, path)
            return
        process, methods = self._servers.get(address, (None, {}))
        if call.link.down or process is None or process.dead:
            self.loop.call_later(DIAL_S, call.break_off, "connection refused",
                                 context=self.context)  # fmt: skip
        else:
            call.open(methods[path], process)

    # Faults

    def calls_between(self, one: str, other: str) -> list[_Call]:
        """Open streams of a link."""
        link = self.link(one, other)
        return [call for call in self.calls.values() if call.link is link]

    def cut(self, one: str, other: str, *, silent: bool) -> int:
        """Returns how many streams it hits."""
        link = self.link(one, other)
        hit = self.calls_between(one, other)
        if silent:
            link.num_silences += 1
        else:
            link.num_resets += 1
            for call in hit:
                call.break_off("connection reset")
        return len(hit)

    def heal(self, one: str, other: str, *, silent: bool) -> None:
        """Takes back one cut. What a silent link held comes with the last one's end."""
        link = self.link(one, other)
        if silent:
            link.num_silences = max(link.num_silences - 1, 0)
        else:
            link.num_resets = max(link.num_resets - 1, 0)
        if not link.silent:
            self._deliver(link)

    def _deliver(self, link: Link) -> None:
        held, link.held = link.held, []
        for function, args in held:
            function(*args)

    def heal_all(self) -> None:
        """Every link."""
        for link in list(self._links.values()):
            link.num_resets = link.num_silences = 0
            self._deliver(link)
        self._tampers.clear()

    def died(self, address: str) -> None:
        """The process at an address is gone, and with it the streams to it."""
        for call in list(self.calls.values()):
            if call._channel.server == address:
                call.break_off("connection reset by peer")

    def client_died(self, client: str) -> None:
        """The process that dialled is gone."""
        for call in list(self.calls.values()):
            if call._channel.client == client:
                call.break_off("connection reset by peer")

    def tamper(self, server: str, tamper: Tamper) -> None:
        """What happens from now on to messages of this server, after what is done already."""
        self._tampers.setdefault(server, []).append(tamper)

    def tamper_no_more(self, server: str, tamper: Tamper) -> None:
        """The others go on."""
        if tamper in self._tampers.get(server, ()):
            self._tampers[server].remove(tamper)

    def tampered(self, channel: SimChannel, path: str, raw: bytes) -> list[tuple[bytes, float]]:
        """The messages that go out in the place of one."""
        parts = [(raw, 0.0)]
        for tamper in self._tampers.get(channel.server, ()):
            parts = [
                (new, late_s + more_s)
                for part, late_s in parts
                for new, more_s in tamper(path, part)
            ]
        return parts
