"""The run's own kustomization: what a user would put on top of an overlay, and no more.

Everything that the run wants other than the overlay says stands here, so that kubectl renders it
as it would for a cluster: the number of workers, settings, images by another name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from os.path import relpath
from pathlib import Path
from typing import Any

import yaml

from deploy.k8s_check import render
from deploy.k8s_check.objects import Rendered

NAMESPACE = "quire"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the run sets. `images` maps a name of the overlay to name:tag."""

    overlay: str = "dev-cpu"
    num_workers: int = 2
    settings: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, str] = field(default_factory=dict)
    worker_variables: Mapping[str, str] = field(default_factory=dict)


def kustomization(wanted: Wanted, folder: Path) -> dict[str, Any]:
    """The document; `folder` is where it will stand."""
    base = relpath(render.K8S / "overlays" / wanted.overlay, folder.resolve())
    document: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": [base],
        "replicas": [{"name": "worker", "count": wanted.num_workers}],
    }
    if wanted.settings:
        literals = [f"{name}={value}" for name, value in wanted.settings.items()]
        document["configMapGenerator"] = [
            {"name": "quire", "behavior": "merge", "literals": literals}
        ]
    if wanted.images:
        document["images"] = [_image(name, to) for name, to in wanted.images.items()]
    if wanted.worker_variables:
        operations = [
            {
                "op": "add",
                "path": "/spec/template/spec/containers/0/env/-",
                "value": {"name": name, "value": value},
            }
            for name, value in wanted.worker_variables.items()
        ]
        patch = yaml.safe_dump(operations, sort_keys=False)
        target = {"kind": "Deployment", "name": "worker"}
        document["patches"] = [{"target": target, "patch": patch}]
    return document


def _image(name: str, to: str) -> dict[str, str]:
    new_name, _, new_tag = to.rpartition(":")
    return {"name": name, "newName": new_name, "newTag": new_tag}


def rendered(wanted: Wanted, folder: Path) -> tuple[str, Rendered]:
    """Writes the kustomization into `folder`; its text, and what kubectl makes of it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(kustomization(wanted, folder), sort_keys=False)
    (folder / "kustomization.yaml").write_text(text)
    return text, render.render(folder, "the run's overlay")
