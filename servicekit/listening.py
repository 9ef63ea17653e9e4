"""Addresses of version 6 beside those of version 4: how they are written and listened on."""

import socket


def joined(host: str, port: int) -> str:
    """host:port, with the brackets that an address of version 6 needs."""
    return f"[{host}]:{port}" if ":" in host.partition("[")[0] else f"{host}:{port}"


def listen(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """A listening TCP socket; on `::` for version 4 too, as gRPC has it. Raises OSError."""
    if ":" not in host:
        return socket.create_server((host, port), backlog=backlog)
    where, family = (host.strip("[]"), port), socket.AF_INET6
    both = where[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(where, family=family, backlog=backlog, dualstack_ipv6=both)
