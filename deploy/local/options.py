"""What the user asked of the launcher, read once from the environment.

PORT, GRPC_PORT, WORKERS and MODEL are the make variables; each stands for its QUIRE_* name and wins
over it. Standard library and servicekit's settings only, so that the set-up can read it too.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from servicekit import settings
from servicekit.catalogue import ALL, CATALOGUE, LOCAL

ROOT = Path(__file__).resolve().parents[2]
SHORT_NAMES = {
    "PORT": "QUIRE_PORT",
    "GRPC_PORT": "QUIRE_GRPC_PORT",
    "WORKERS": "QUIRE_WORKERS",
    "MODEL": "QUIRE_MODEL",
}
DEFAULT_DRAIN_S = 5.0
DEFAULT_CACHE_DIR = Path("~/.cache/quire").expanduser()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run of the launcher. `environ` is what the children inherit."""

    host: str
    port: int
    grpc_port: int
    workers: int
    model: str
    served_model_name: str
    api_keys_file: str
    redis_url: str
    cache_dir: Path
    data_dir: Path | None
    drain_s: float
    num_threads: int
    environ: Mapping[str, str]

    @property
    def reach(self) -> str:
        """The host under which this machine reaches its own gateway."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)


def read(environ: Mapping[str, str], cores: int | None = None) -> Options:
    """The options. Raises settings.SettingsError naming a variable that is wrong or unknown."""
    merged = dict(environ)
    for short, name in SHORT_NAMES.items():
        if merged.get(short, "").strip():
            merged[name] = merged[short].strip()
    # Every service's values are checked here: a typing error ends the launcher, not a child.
    try:
        values = {s: settings.load(s, CATALOGUE, [], merged) for s in (*ALL.split(), LOCAL)}
    except settings.SettingsError as error:
        raise settings.SettingsError(_as_typed(str(error), environ)) from error
    gateway, local = values["gateway"], values[LOCAL]
    cores = cores or len(os.sched_getaffinity(0))
    data_dir = local["data_dir"]
    return Options(
        host=gateway["host"],
        port=gateway["port"],
        grpc_port=gateway["grpc_port"],
        workers=local["workers"],
        model=gateway["model"],
        served_model_name=gateway["served_model_name"],
        api_keys_file=gateway["api_keys_file"],
        redis_url=merged.get("QUIRE_REDIS_URL", ""),
        cache_dir=Path(local["cache_dir"]).expanduser(),
        data_dir=Path(data_dir).expanduser().resolve() if data_dir else None,
        drain_s=gateway["drain_s"] if merged.get("QUIRE_DRAIN_S") else DEFAULT_DRAIN_S,
        num_threads=values["gpu_worker"]["num_threads"] or max(1, cores // local["workers"]),
        environ=merged,
    )


def _as_typed(message: str, environ: Mapping[str, str]) -> str:
    """The message under the name that the user wrote."""
    for short, name in SHORT_NAMES.items():
        if environ.get(short, "").strip() and message.startswith(f"{name}="):
            return message.replace(name, short, 1)
    return message
