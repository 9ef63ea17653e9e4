"""The gateway's settings, read once at start."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servicekit import settings as kit
from servicekit.catalogue import CATALOGUE, GATEWAY
from servicekit.settings import SettingsError

VERSION = "0.1.0"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Field names are those of the catalogue."""

    host: str
    redis_url: str
    model: str
    served_model_name: str
    ops_port: int
    log_level: str
    drain_s: float
    port: int
    grpc_port: int
    api_keys_file: str
    max_queued_requests: int
    max_queued_tokens: int
    default_deadline_s: float
    stall_s: float
    stream_buffer_tokens: int
    max_body_bytes: int
    max_grpc_message_bytes: int
    tokenizer_threads: int
    max_model_len: int

    def validate(self) -> None:
        """Raises SettingsError."""
        if self.host not in _LOOPBACK and not self.api_keys_file:
            raise SettingsError(
                f"QUIRE_HOST={self.host!r}: without QUIRE_API_KEYS_FILE the gateway serves only "
                f"this machine; use one of {', '.join(_LOOPBACK)}, or name a file of API keys"
            )


def load(argv: Sequence[str], environ: Mapping[str, str]) -> GatewaySettings:
    """Reads and validates. Raises SettingsError."""
    settings = GatewaySettings(**kit.load(GATEWAY, CATALOGUE, argv, environ))
    settings.validate()
    return settings
