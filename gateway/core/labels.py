"""What travels with a request beside its prompt: its cache partition and its trace."""

import hashlib
import re

# Version, trace id, span id, flags; a later version may add parts behind them.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_MAX_TRACEPARENT = 256


def cache_partition(tenant: str, salt: str) -> bytes:
    """The part of the prefix cache that a request may read and fill; b"" is the shared one.

    Only a digest leaves the gateway: of fixed length, and nobody's own words.
    """
    if not tenant and not salt:
        return b""
    name = tenant.encode()
    return hashlib.sha256(b"%d:%b%b" % (len(name), name, salt.encode())).digest()


def valid_traceparent(text: str) -> str:
    """`text` if it is a W3C trace context, else "": a broken one is dropped, never refused."""
    if len(text) > _MAX_TRACEPARENT or not (found := _TRACEPARENT.fullmatch(text)):
        return ""
    version, trace_id, span_id, more = found.groups()
    if version == "ff" or (version == "00" and more is not None):
        return ""
    return text if trace_id.strip("0") and span_id.strip("0") else ""
