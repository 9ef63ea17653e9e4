"""Renders kustomizations with kubectl: every overlay, and the components alone, in pairs and all.

Combinations are written into a folder that is deleted again; nothing here changes the repository.
"""

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from deploy.k8s_check.objects import Manifest, Rendered

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy" / "k8s"
LIMIT_S = 60.0
# In the order in which they must be listed: a later one patches what an earlier one brought.
OPTIONS: tuple[tuple[str, ...], ...] = (
    ("gpu",),
    ("autoscale",),
    ("autoscale", "autoscale/from-zero"),
    ("model-cache", "network-policies"),
    ("monitoring",),
    ("external-redis",),
    ("model-cache",),
)


class RenderError(Exception):
    """kubectl refused a kustomization; the message is its own."""


def kubectl() -> Path:
    """The one of this environment, or the one on the path."""
    beside = Path(sys.executable).with_name("kubectl")
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    if found is None:
        raise RenderError("no kubectl: run  make setup")
    return Path(found)


def parse(text: str) -> tuple[Manifest, ...]:
    """The documents of a YAML stream."""
    # The same safe constructors as yaml.safe_load_all, in C: rendering is half of the time else.
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(found for found in yaml.load_all(text, Loader=loader) if found)


def render(folder: Path, name: str) -> Rendered:
    """One kustomization. Raises RenderError."""
    done = subprocess.run(
        [str(kubectl()), "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RenderError(f"{name}: {done.stderr.strip()}")
    return Rendered(name=name, manifests=parse(done.stdout))


def overlays() -> list[str]:
    """Names of the overlays in the repository."""
    return sorted(path.parent.name for path in K8S.glob("overlays/*/kustomization.yaml"))


def combinations() -> Iterator[tuple[str, ...]]:
    """Lists of components for the base: none, one, every pair, all."""
    seen = set()
    for count in (0, 1, 2, len(OPTIONS)):
        for chosen in itertools.combinations(OPTIONS, count):
            wanted = {name for option in chosen for name in option}
            ordered = tuple(
                dict.fromkeys(name for option in _ordered() for name in option if name in wanted)
            )
            if ordered not in seen:
                seen.add(ordered)
                yield ordered


def _ordered() -> Sequence[tuple[str, ...]]:
    return sorted(OPTIONS, key=lambda option: "external-redis" in option)


def write(folder: Path, components: Sequence[str], base: str = "base") -> None:
    """A kustomization of the base with these components."""
    folder.mkdir(parents=True)
    root = os.path.relpath(K8S, folder.resolve())
    lines = [
        "apiVersion: kustomize.config.k8s.io/v1beta1",
        "kind: Kustomization",
        "namespace: quire",
        f"resources: [{root}/{base}]",
        "components:",
        *(f"  - {root}/components/{name}" for name in components),
    ]
    text = "\n".join(lines if components else lines[:-1]) + "\n"
    (folder / "kustomization.yaml").write_text(text)


def render_all() -> list[Rendered]:
    """Overlays first, then combinations. Raises RenderError."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool,
    ):
        wanted = [(K8S / "overlays" / name, f"overlays/{name}") for name in overlays()]
        for components in combinations():
            name = "+".join(("base", *components))
            folder = Path(scratch) / name.replace("/", "_")
            write(folder, components)
            wanted.append((folder, name))
        return list(pool.map(lambda pair: render(*pair), wanted))
