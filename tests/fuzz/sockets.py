"""What a process listens on and whom it talks to, as the kernel sees it: no library can hide it."""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

_LISTEN, _UNCONNECTED = 0x0A, 0x07


@dataclass(frozen=True, slots=True, kw_only=True)
class Socket:
    """One internet socket. `peer_port` is 0 while there is none."""

    address: str
    port: int
    peer: str
    peer_port: int
    listens: bool


def sockets_of(pid: int) -> list[Socket]:
    """TCP and UDP, both families."""
    own = _inodes(pid)
    found: list[Socket] = []
    for name in ("tcp", "tcp6", "udp", "udp6"):
        waiting = _LISTEN if name.startswith("tcp") else _UNCONNECTED
        path = Path(f"/proc/{pid}/net/{name}")
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            columns = line.split()
            if columns[9] not in own:
                continue
            (address, port), (peer, peer_port) = map(_address, columns[1:3])
            found.append(
                Socket(
                    address=address,
                    port=port,
                    peer=peer,
                    peer_port=peer_port,
                    listens=int(columns[3], 16) == waiting,
                )
            )
    return found


def listening(pid: int) -> set[tuple[str, int]]:
    """Where others can reach a process."""
    return {(s.address, s.port) for s in sockets_of(pid) if s.listens}


def reached(pid: int) -> set[tuple[str, int]]:
    """Whom a process has called: peers of connections that did not come in by a port of its own."""
    own = {port for _, port in listening(pid)}
    return {(s.peer, s.peer_port) for s in sockets_of(pid) if s.peer_port and s.port not in own}


def _inodes(pid: int) -> set[str]:
    found = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def _address(text: str) -> tuple[str, int]:
    """The kernel writes words of 32 bits in the machine's order."""
    words, port = text.split(":")
    data = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    address = ipaddress.ip_address(data)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int(port, 16)
