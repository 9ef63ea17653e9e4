"""Addresses of version 6 beside those of version 4: how they are written and listened on."""

import socket


def joined(host: str, port: int) -> str:
    """host:port, with the brackets that an address of version 6 needs."""
    bare = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if bare else f"{host}:{port}"


def listen(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """A listening TCP socket; on `::` for version 4 too, as gRPC has it. Raises OSError."""
    if ":" not in host:
        return socket.create_server((host, port), backlog=backlog)
    bare = host.removeprefix("[").removesuffix("]")
    return socket.create_server(
        (bare, port),
        family=socket.AF_INET6,
        backlog=backlog,
        dualstack_ipv6=bare == "::" and socket.has_dualstack_ipv6(),
    )
