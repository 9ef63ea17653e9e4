"""API keys: the text of a key file to a ring that says whose key a client has shown.

A file holds hashes only, one a line: `tenant:sha256hex[:weight]`. Blank lines and lines that begin
with # say nothing. A tenant may have several keys, so that they can be changed without a gap; a
hash may stand once only. No error and no log line ever repeats what stands in a line.
"""

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.core.errors import GatewayError

MAX_KEYS = 1024
MAX_FILE_BYTES = 262_144
MAX_KEY_BYTES = 512
MAX_WEIGHT = 1000
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_SCHEME = b"bearer "


class KeysError(Exception):
    """A key file can't be used; the message names the line."""


class UnauthorizedError(GatewayError):
    """No key, or one that nobody has. Which of the two it was is not said."""

    code = "invalid_api_key"

    def __init__(self) -> None:
        super().__init__("A valid API key is needed: Authorization: Bearer KEY.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as the gateway knows it. `weight` is the tenant's share against other tenants."""

    tenant: str
    digest: bytes
    weight: int = 1


class KeyRing:
    """The keys of one version of the file."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)
        self._weights: dict[str, int] = {}
        for key in keys:
            self._weights[key.tenant] = max(key.weight, self._weights.get(key.tenant, 0))

    def __len__(self) -> int:
        return len(self._keys)

    def weight(self, tenant: str) -> float:
        """The largest weight among the tenant's keys; 1 for one that has none any more."""
        return float(self._weights.get(tenant, 1))

    def owner(self, authorization: Sequence[bytes]) -> ApiKey:
        """The key in the one Authorization value there must be. Raises UnauthorizedError."""
        shown = authorization[0] if len(authorization) == 1 else b""
        if shown[: len(_SCHEME)].lower() != _SCHEME or len(shown) > MAX_KEY_BYTES:
            raise UnauthorizedError
        digest = hashlib.sha256(shown[len(_SCHEME) :].strip()).digest()
        found = None
        # Every key is compared, whole: time tells neither how near a guess was nor whose key it is.
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise UnauthorizedError
        return found


def parse(data: bytes) -> KeyRing:
    """The ring of a file's bytes. Raises KeysError naming the first line that is wrong."""
    if len(data) > MAX_FILE_BYTES:
        raise KeysError(f"the file is larger than {MAX_FILE_BYTES} bytes")
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            text = line.decode("ascii").strip()
        except UnicodeDecodeError:
            raise KeysError(f"line {number}: only ASCII is allowed") from None
        if not text or text.startswith("#"):
            continue
        key = _parse_line(number, text)
        if key.digest in keys:
            raise KeysError(f"line {number}: this hash stands in an earlier line")
        keys[key.digest] = key
        if len(keys) > MAX_KEYS:
            raise KeysError(f"line {number}: more than {MAX_KEYS} keys")
    if not keys:
        raise KeysError("the file holds no key")
    return KeyRing(tuple(keys.values()))


def _parse_line(number: int, text: str) -> ApiKey:
    tenant, *rest = text.split(":")
    if not 1 <= len(rest) <= 2:
        raise KeysError(f"line {number}: must be tenant:sha256 or tenant:sha256:weight")
    if not _TENANT.fullmatch(tenant):
        raise KeysError(
            f"line {number}: a tenant has 1 to 64 letters, digits, dots, dashes or underscores and "
            "begins with a letter or digit"
        )
    if not _DIGEST.fullmatch(rest[0]):
        raise KeysError(f"line {number}: the hash must be 64 hexadecimal digits (SHA-256)")
    weight = rest[1] if len(rest) == 2 else "1"
    if not (weight.isdecimal() and len(weight) <= 4 and 1 <= int(weight) <= MAX_WEIGHT):
        raise KeysError(f"line {number}: the weight must be from 1 to {MAX_WEIGHT}")
    return ApiKey(tenant=tenant, digest=bytes.fromhex(rest[0]), weight=int(weight))
