"""What a worker announces for the host that it listens on."""

import socket
import threading

import pytest

from gpu_worker import address
from gpu_worker.address import host_to_announce, own_addresses

NAME = "worker-7d4f"


@pytest.mark.parametrize(
    ("host", "addresses", "announced"),
    [
        # A host that is one is left alone, whatever the name resolves to.
        ("127.0.0.1", ["10.1.2.3"], "127.0.0.1"),
        ("gpu-3.example", ["10.1.2.3"], "gpu-3.example"),
        ("0.0.0.0", ["10.1.2.3"], "10.1.2.3"),
        ("", ["10.1.2.3", "10.1.2.4"], "10.1.2.3"),
        # Loopback and link-local addresses are nobody else's.
        ("0.0.0.0", ["127.0.1.1"], NAME),
        ("0.0.0.0", ["127.0.1.1", "169.254.0.4", "10.1.2.3"], "10.1.2.3"),
        ("::", ["::1", "fe80::1%eth0", "fd00::7"], "[fd00::7]"),
        # A socket of version 4 is not announced with an address of version 6.
        ("0.0.0.0", ["fd00::7", "10.1.2.3"], "10.1.2.3"),
        ("0.0.0.0", ["fd00::7"], NAME),
        ("[::]", ["fd00::7", "10.1.2.3"], "[fd00::7]"),
        ("0.0.0.0", [], NAME),
    ],
)
def test_a_wildcard_becomes_what_the_name_resolves_to(
    host: str, addresses: list[str], announced: str
) -> None:
    assert host_to_announce(host, NAME, addresses) == announced


async def test_a_name_is_resolved() -> None:
    assert "127.0.0.1" in await own_addresses("localhost")


async def test_a_name_that_means_nothing_gives_no_address() -> None:
    assert await own_addresses("no-such-host.invalid") == []


async def test_a_resolver_that_hangs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker starts all the same."""
    monkeypatch.setattr(address, "RESOLVE_S", 0.01)
    released = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        released.wait()
        return [(0, 0, 0, "", ("10.1.2.3", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    found = await own_addresses(NAME)
    released.set()
    assert found == []
