"""python -m deploy.docker: builds the images with buildah, podman or docker.

Standard library only. Without a builder it says so and skips; a build that fails ends it with the
builder's status. One image after the other: the worker's alone takes all cores for its kernels.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("gateway", "scheduler", "worker")
BUILDERS = ("buildah", "podman", "docker")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def version() -> str:
    """Quire's own, which is the images' tag."""
    found = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def tag(service: str, torch_build: str) -> str:
    """Name and tag of an image. The worker's says which torch it holds."""
    return f"quire/{service}:{version()}" + (f"-{torch_build}" if service == "worker" else "")


def command(
    builder: str, service: str, environ: Mapping[str, str], name: str | None = None
) -> list[str]:
    """The builder's command line; `name` is another name and tag than the release's.

    IMAGE_FLAGS adds options for the builder, split as a shell would, and they win: a mirror's
    configuration as a volume, say, which is never baked in.
    """
    build = environ.get("TORCH_BUILD") or "cpu"
    if build not in ("cpu", "cuda"):
        raise ValueError(f"TORCH_BUILD={build!r}: must be cpu or cuda")
    arguments = {}
    if environ.get("PYTHON_IMAGE"):
        arguments["PYTHON_IMAGE"] = environ["PYTHON_IMAGE"]
    if service == "worker":
        arguments["TORCH_BUILD"] = build
        default = CPU_INDEX if build == "cpu" else ""
        arguments["TORCH_INDEX"] = environ.get("TORCH_INDEX") or default
    return [
        builder,
        "build",
        *(part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")),
        *shlex.split(environ.get("IMAGE_FLAGS", "")),
        *("--file", f"deploy/docker/{service}.Dockerfile"),
        *("--tag", name or tag(service, build)),
        ".",
    ]


def usable(builder: str) -> bool:
    """Whether it is installed and, where it needs a daemon, the daemon answers."""
    if shutil.which(builder) is None:
        return False
    if builder != "docker":
        return True
    return subprocess.run([builder, "info"], capture_output=True, check=False).returncode == 0


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Builds the named images, or all."""
    parser = argparse.ArgumentParser(prog="python -m deploy.docker", description=__doc__)
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=", ".join(SERVICES))
    wanted = parser.parse_args(list(argv)).images or list(SERVICES)
    unknown = sorted(set(wanted) - set(SERVICES))
    if unknown:
        print(f"[images] no such image: {', '.join(unknown)}", file=sys.stderr)
        return 2
    builder = next((name for name in BUILDERS if usable(name)), None)
    if builder is None:
        print(f"[images] skipped: none of {', '.join(BUILDERS)} can be used here")
        return 0
    for service in wanted:
        try:
            line = command(builder, service, environ)
        except ValueError as error:
            print(f"[images] {error}", file=sys.stderr)
            return 2
        print(f"[images] {shlex.join(line)}", flush=True)
        status = subprocess.run(line, cwd=ROOT, check=False).returncode
        if status != 0:
            print(f"[images] {service} failed, status {status}", file=sys.stderr)
            return status
    print("[images] built", ", ".join(tag(s, environ.get("TORCH_BUILD") or "cpu") for s in wanted))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
