"""Views of rendered manifests: pods, containers, variables, selectors. Nothing here judges."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Manifest = dict[str, Any]

COMPONENT = "app.kubernetes.io/component"
SERVICES = {"gateway": "gateway", "scheduler": "scheduler_svc", "worker": "gpu_worker"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """What one kustomization gives."""

    name: str
    manifests: tuple[Manifest, ...]

    def of(self, *kinds: str) -> Iterator[Manifest]:
        """Those of the kinds."""
        return (m for m in self.manifests if m["kind"] in kinds)

    def find(self, kind: str, name: str) -> Manifest | None:
        """The one of that name."""
        return next((m for m in self.of(kind) if m["metadata"]["name"] == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Something that makes pods, and the pods' template."""

    manifest: Manifest
    labels: Mapping[str, str]
    spec: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Kind and name, as problems show it."""
        return title(self.manifest)

    @property
    def component(self) -> str:
        """gateway, scheduler, worker, redis or model-cache."""
        return self.labels.get(COMPONENT, "")

    @property
    def containers(self) -> Sequence[Mapping[str, Any]]:
        """Without those that run before."""
        return tuple(self.spec["containers"])

    @property
    def all_containers(self) -> Sequence[Mapping[str, Any]]:
        """With those that run before."""
        return (*self.spec.get("initContainers", ()), *self.spec["containers"])


def title(manifest: Manifest) -> str:
    """Kind and name."""
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def workloads(rendered: Rendered) -> list[Workload]:
    """All that make pods."""
    found = []
    for manifest in rendered.of("Deployment", "StatefulSet", "Job", "DaemonSet"):
        template = manifest["spec"]["template"]
        found.append(
            Workload(
                manifest=manifest,
                labels=template.get("metadata", {}).get("labels", {}),
                spec=template["spec"],
            )
        )
    return found


def services(rendered: Rendered) -> list[Workload]:
    """Quire's own processes: gateways, schedulers, workers."""
    return [w for w in workloads(rendered) if w.component in SERVICES]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a selector with matchLabels and matchExpressions takes these labels."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for rule in selector.get("matchExpressions", ()):
        value = labels.get(rule["key"])
        match rule["operator"]:
            case "In":
                good = value in rule["values"]
            case "NotIn":
                good = value not in rule["values"]
            case "Exists":
                good = value is not None
            case "DoesNotExist":
                good = value is None
            case other:
                raise ValueError(f"no such operator: {other}")
        if not good:
            return False
    return True


def variables(rendered: Rendered, container: Mapping[str, Any]) -> dict[str, str | None]:
    """What the container will find in its environment; None where a Secret or field says it."""
    found: dict[str, str | None] = {}
    for source in container.get("envFrom", ()):
        reference = source.get("configMapRef", {}).get("name", "")
        config = rendered.find("ConfigMap", reference)
        found.update(config.get("data", {}) if config else {})
    for entry in container.get("env", ()):
        value = entry.get("value")
        key = entry.get("valueFrom", {}).get("configMapKeyRef")
        if key is not None:
            config = rendered.find("ConfigMap", key["name"])
            value = config.get("data", {}).get(key["key"]) if config else None
        found[entry["name"]] = value
    return found


def ports(container: Mapping[str, Any]) -> dict[str, int]:
    """Named ports of a container."""
    return {port["name"]: int(port["containerPort"]) for port in container.get("ports", ())}
