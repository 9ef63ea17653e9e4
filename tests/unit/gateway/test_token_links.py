"""What a gateway takes for lost when it gives a worker up: streams by script, a made-up clock."""

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from quire.v1 import worker_pb2

from gateway.adapters.tokens_grpc import GIVE_UP_S, TokensLink
from gateway.core.types import TokenBatch, WorkerRecord
from gateway.ports import WorkerLink

RECORD = WorkerRecord(
    worker_id="w", incarnation=1, address="nowhere:1", model_digest="d", max_model_len=512
)
BROKEN = grpc.aio.AioRpcError(
    grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "broken"
)
END: Any = grpc.aio.EOF
SUBSCRIBED = worker_pb2.TokensResponse(subscribed=worker_pb2.Subscribed(incarnation=1))


class Sink:
    """Counts gaps."""

    def __init__(self) -> None:
        self.num_gaps = 0

    def on_batch(self, batch: TokenBatch, link: WorkerLink, *, hold: bool = False) -> None:
        """None is sent."""

    def on_gap(self, link: WorkerLink) -> None:
        """Counts."""
        self.num_gaps += 1

    def on_notice(self, notice: object) -> None:
        """None comes this way."""


class Script:
    """A channel whose streams answer as they are told, and of which the last leaves the registry.

    Each stream is a list of what its reads give or raise.
    """

    def __init__(self, *streams: list[Any]) -> None:
        self._streams = list(streams)
        self.now_s = 100.0
        dial: Any = lambda _address: self  # noqa: E731
        self.link = TokensLink(RECORD, "g", b"r" * 16, clock_s=lambda: self.now_s, dial=dial)

    async def __aenter__(self) -> "Script":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    def stream_stream(self, *_: object, **__: object) -> Callable[[], Any]:
        """What the stub asks for."""
        return self._open

    def _open(self) -> "Script":
        self._reads = self._streams.pop(0)
        return self

    async def write(self, _message: object) -> None:
        """Heard by nobody."""

    async def read(self) -> Any:
        """The script's next; the clock goes on by a second."""
        self.now_s += 1.0
        found = self._reads.pop(0)
        if not self._reads and not self._streams:
            self.link.registered = False
        if found is BROKEN:
            raise found
        return found

    def cancel(self) -> bool:
        """The link is done with it."""
        if not self._streams:
            self.link.replaced = True
        return True

    async def num_gaps(self) -> int:
        """What the link reports until it gives up."""
        sink = Sink()
        await self.link.run(sink)
        return sink.num_gaps


async def test_a_worker_that_breaks_off_may_have_taken_tokens_with_it() -> None:
    assert await Script([SUBSCRIBED, BROKEN]).num_gaps() == 1


async def test_a_worker_that_ends_its_stream_in_order_has_told_all() -> None:
    assert await Script([SUBSCRIBED, END]).num_gaps() == 0


async def test_only_the_last_end_counts() -> None:
    """It came back after an orderly end: what it computed then is lost with it."""
    assert await Script([SUBSCRIBED, END], [SUBSCRIBED, BROKEN]).num_gaps() == 1
    assert await Script([SUBSCRIBED, BROKEN], [SUBSCRIBED, END]).num_gaps() == 0


async def test_a_worker_that_was_never_reached_has_nothing_of_ours() -> None:
    assert await Script([BROKEN]).num_gaps() == 0


@pytest.mark.parametrize("registered", [False, True])
def test_a_broken_stream_is_waited_for_while_the_worker_may_come_back(registered: bool) -> None:
    script = Script()
    script.link.registered = registered
    script.now_s += GIVE_UP_S
    assert not script.link.given_up
    script.now_s += 0.1
    assert script.link.given_up is not registered
