"""Where this machine's pip gets packages, for builds: mounted while they run, never baked in."""

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

CERTIFICATES = "/etc/ssl/certs"
SOURCES = ("index-url", "extra-index-url", "find-links")
CARRIED = (*SOURCES, "trusted-host", "cert", "proxy", "timeout", "default-timeout")
LIMIT_S = 60.0


def settings() -> dict[str, str]:
    """pip's settings that say where packages come from; those of the environment win."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    return parse(done.stdout.splitlines())


def parse(lines: Iterable[str]) -> dict[str, str]:
    """Of lines like  global.index-url='address'  or  :env:.index-url='address'."""
    found: dict[str, str] = {}
    ordered = sorted(lines, key=lambda line: line.startswith(":env:"))
    for line in ordered:
        name, separator, value = line.partition("=")
        key = name.rpartition(".")[2]
        if separator and key in CARRIED:
            found[key] = value.strip().strip("'\"")
    return found


def flags(found: Mapping[str, str], folder: Path) -> list[str]:
    """Options for the builder; writes the configuration that is mounted into `folder`."""
    if not found:
        return []
    lines = ["[global]", *(f"{key} = {value}" for key, value in found.items())]
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    mounts = [(str(folder), "/root/.config/pip")]
    mounts += [(path, path) for path in local_paths(found)]
    if "cert" in found:
        mounts.append((CERTIFICATES, CERTIFICATES))
    return [word for source, target in mounts for word in ("--volume", f"{source}:{target}:ro")]


def local_paths(found: Mapping[str, str]) -> list[str]:
    """Folders of this machine among the places. An index may name files beside its own folder."""
    paths = set()
    for key in SOURCES:
        for place in found.get(key, "").split():
            path = Path(urlsplit(place).path if place.startswith("file:") else place)
            if path.is_absolute() and path.exists():
                paths.add(str(path if key == "find-links" else path.parent))
    return sorted(paths)


def has_sources(found: Mapping[str, str]) -> bool:
    """Whether packages come from elsewhere than pip would look by itself."""
    return any(key in found for key in SOURCES)
