"""The address that a worker announces, which schedulers and gateways dial.

A wildcard host is no address. What stands for it is the address that the machine's own name
resolves to: in a Kubernetes pod that is the pod's, since the kubelet writes it into /etc/hosts,
while the pod's name means nothing to others. Where only loopback is found (Debian's 127.0.1.1) or
nothing at all, the name itself is announced: the others may know it.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

WILDCARDS = ("0.0.0.0", "::", "[::]", "")
RESOLVE_S = 5.0


async def own_addresses(name: str) -> list[str]:
    """What `name` resolves to, in the resolver's order; nothing after RESOLVE_S or an error."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        return []
    return [str(address[0]) for *_, address in found]


def host_to_announce(host: str, name: str, addresses: Sequence[str]) -> str:
    """`host` as it is dialled; of a wildcard the first of `addresses` that others can reach."""
    if host not in WILDCARDS:
        return host
    for address in addresses:
        found = ipaddress.ip_address(address.partition("%")[0])
        reachable = not (found.is_loopback or found.is_link_local or found.is_unspecified)
        # 0.0.0.0 does not listen on any address of version 6.
        if reachable and (found.version == 4 or host != "0.0.0.0"):
            return f"[{found}]" if found.version == 6 else str(found)
    return name
