"""Renderings of the overlays, and hands to break one thing in them."""

import copy
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from deploy.k8s_check import render
from deploy.k8s_check.objects import Manifest, Rendered

Check = Callable[[Rendered], Iterator[str]]
Change = Callable[[Rendered], None]


@cache
def _overlay(name: str) -> Rendered:
    return render.render(render.K8S / "overlays" / name, f"overlays/{name}")


def overlay(name: str = "prod") -> Rendered:
    """A copy of an overlay's rendering, to be broken."""
    return copy.deepcopy(_overlay(name))


def get(rendered: Rendered, kind: str, name: str) -> Manifest:
    """The object; ConfigMaps by the name before the hash."""
    for manifest in rendered.of(kind):
        found = manifest["metadata"]["name"]
        hashed = kind == "ConfigMap" and re.fullmatch(rf"{name}-[a-z0-9]{{10}}", found)
        if found == name or hashed:
            return manifest
    raise KeyError(f"{kind} {name}")


def pod(rendered: Rendered, name: str, kind: str = "Deployment") -> dict[str, Any]:
    """The pod's specification."""
    found: dict[str, Any] = get(rendered, kind, name)["spec"]["template"]["spec"]
    return found


def container(rendered: Rendered, name: str) -> dict[str, Any]:
    """Its own container."""
    found: dict[str, Any] = pod(rendered, name)["containers"][0]
    return found


def variable(rendered: Rendered, component: str, name: str, value: str) -> None:
    """Sets a variable of a Deployment."""
    entries = container(rendered, component)["env"]
    entries[:] = [entry for entry in entries if entry["name"] != name]
    entries.append({"name": name, "value": value})


def setting(rendered: Rendered, name: str, value: str) -> None:
    """Sets a variable of all."""
    get(rendered, "ConfigMap", "quire")["data"][name] = value


def model_gib(rendered: Rendered, size: str | None) -> None:
    """Says another size of the model's weights, or none."""
    annotations = get(rendered, "ConfigMap", "model-source")["metadata"]["annotations"]
    del annotations["quire/model-gib"]
    if size is not None:
        annotations["quire/model-gib"] = size


def rule(rendered: Rendered, name: str) -> dict[str, Any]:
    """An alert."""
    rules = get(rendered, "PrometheusRule", "quire")["spec"]["groups"][0]["rules"]
    return next(entry for entry in rules if entry["alert"] == name)


def trigger(rendered: Rendered, place: int) -> dict[str, Any]:
    """What a trigger of the workers' autoscaler asks."""
    triggers = get(rendered, "ScaledObject", "worker")["spec"]["triggers"]
    found: dict[str, Any] = triggers[place]["metadata"]
    return found


def remove(rendered: Rendered, kind: str, name: str) -> Rendered:
    """Without an object."""
    gone = get(rendered, kind, name)
    return Rendered(
        name=rendered.name, manifests=tuple(m for m in rendered.manifests if m is not gone)
    )
