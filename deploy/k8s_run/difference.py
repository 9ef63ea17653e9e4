"""What was changed between the rendered manifests and the played ones, and why. Pure.

Names and ports may differ, and what podman cannot do; every change must match a rule that says
which it is. A change without a rule is a difference that nobody explained: `unexplained` gives it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.k8s_check.objects import Rendered, workloads
from deploy.k8s_run import pods

NAMES, PORTS, PODMAN = "names", "ports", "podman"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One place of a manifest. None stands for nothing."""

    path: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Places that may differ, of what kind the difference is, and the reason."""

    path: str
    kind: str
    reason: str
    allows: Callable[[Change], bool] = lambda change: True


def _is_put_in_place(change: Change) -> bool:
    """A variable from a Secret: its value in its place, or nothing where it is optional."""
    reference = _secret_reference(change.before)
    if reference is None:
        return False
    if change.after is None:
        return bool(reference.get("optional"))
    return bool(
        change.after.keys() == {"name", "value"} and change.after["name"] == change.before["name"]
    )


def _secret_reference(entry: Any) -> Mapping[str, Any] | None:
    """Of an entry of `env`; None if it is anything else."""
    found = entry.get("valueFrom", {}).get("secretKeyRef") if isinstance(entry, Mapping) else None
    return found if isinstance(found, Mapping) else None


RULES = (
    Rule(path=r"metadata\.name", kind=NAMES, reason="a controller would name the pod"),
    Rule(
        path=r"metadata\.labels\.app\.kubernetes\.io/managed-by",
        kind=NAMES,
        reason="marks what the run has made",
    ),
    Rule(
        path=r".*(configMap|configMapRef|configMapKeyRef)\.name|.*persistentVolumeClaim\.claimName",
        kind=NAMES,
        reason="podman has no namespaces: names carry the run's prefix",
    ),
    Rule(
        path=r".*(volumes|volumeMounts)\[\d+\]\.name",
        kind=NAMES,
        reason="an emptyDir by its name alone would be one volume for all pods",
    ),
    Rule(
        path=r".*ontainers\[.*\]\.ports",
        kind=PORTS,
        reason="podman would publish them on this machine, where pods of a kind collide",
    ),
    Rule(
        path=r".*\.(startupProbe|readinessProbe|livenessProbe)",
        kind=PODMAN,
        reason="podman asks with curl inside the container; the run asks them as a kubelet does",
    ),
    Rule(
        path=r"metadata\.annotations\.io\.podman\.annotations\.init\.container\.type",
        kind=PODMAN,
        reason="podman would remove containers that ran before the others while they seem to run",
    ),
    Rule(
        path=r".*\.env\[[^\]]*\]",
        kind=PODMAN,
        reason="podman reads a Secret's keys differently in each version: the value is put there",
        allows=_is_put_in_place,
    ),
    Rule(
        path=r".*volumes\[\d+\]\.(secret|persistentVolumeClaim)",
        kind=PODMAN,
        reason="podman reads a Secret's keys differently in each version: a volume holds its files",
    ),
    Rule(
        path=r".*volumes\[\d+\]",
        kind=PODMAN,
        reason="podman has no volumeClaimTemplates: the claim of the pod stands in its place",
    ),
)

# Kinds of objects that podman does not know, and what the run does in their place.
UNPLAYED = {
    "Deployment": "its pods are played; the run stands in for the controller",
    "StatefulSet": "its pods are played; the run stands in for the controller",
    "Job": "its pod is played and waited for; the volume was filled before, from the model's cache",
    "Service": "its pods answer to its name on the network",
    "ServiceAccount": "podman has none; no pod mounts a token",
    "PersistentVolumeClaim": "a podman volume, without a size",
    "HorizontalPodAutoscaler": "as many pods as its minReplicas",
    "PodDisruptionBudget": "nothing is evicted",
}

# Fields that podman takes and does nothing with; by their last words below a pod.
IGNORED = {
    "serviceAccountName": "no accounts",
    "automountServiceAccountToken": "no accounts",
    "enableServiceLinks": "no Services, and so no links",
    "topologySpreadConstraints": "one machine",
    "terminationGracePeriodSeconds": "the run gives it to podman stop",
    "securityContext.fsGroup": "the run sets the owner of what it writes into volumes",
    "securityContext.runAsNonRoot": "not checked; runAsUser is honoured",
    "securityContext.seccompProfile": "podman's own default profile is used",
    "resources.requests": "nothing is scheduled; limits are honoured",
    "lifecycle": "no hooks; no pod that has one is stopped before the end",
    "emptyDir.sizeLimit": "not limited",
}


def changes(before: Any, after: Any, path: str = "") -> Iterator[Change]:
    """Every place that differs; a part that is missing on one side is one place.

    A variable that came from a Secret is one place, too: what it was decides what it may become.
    """
    if _secret_reference(before) is not None and before != after:
        yield Change(path=path, before=before, after=after)
    elif isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in (*before, *(k for k in after if k not in before)):
            below = f"{path}.{key}" if path else str(key)
            yield from changes(before.get(key), after.get(key), below)
    elif isinstance(before, list) and isinstance(after, list):
        left, right = _keyed(path, before), _keyed(path, after)
        for key in (*left, *(k for k in right if k not in left)):
            yield from changes(left.get(key), right.get(key), f"{path}[{key}]")
    elif before != after:
        yield Change(path=path, before=before, after=after)


def _keyed(path: str, entries: Sequence[Any]) -> dict[str, Any]:
    """Containers and variables by name; everything else by place."""
    if path.endswith(("ontainers", ".env")):
        return {str(entry["name"]): entry for entry in entries}
    return {str(i): entry for i, entry in enumerate(entries)}


def rule_of(change: Change) -> Rule | None:
    """The first rule that explains it."""
    return next(
        (rule for rule in RULES if re.fullmatch(rule.path, change.path) and rule.allows(change)),
        None,
    )


def of_pod(pod: pods.PlayedPod) -> list[Change]:
    """Rendered against played."""
    return list(changes(pods.expected(pod.work), pod.manifest))


def unexplained(played: Sequence[pods.PlayedPod]) -> list[str]:
    """Changes that no rule allows."""
    return [
        f"{pod.name}: {change.path}: {change.before!r} became {change.after!r}"
        for pod in played
        for change in of_pod(pod)
        if rule_of(change) is None
    ]


def report(rendered: Rendered, played: Sequence[pods.PlayedPod]) -> Iterator[str]:
    """Lines for people. Values from Secrets are not shown."""
    for work in workloads(rendered):
        mine = [pod for pod in played if pod.work.name == work.name]
        yield f"{work.name}: {', '.join(pod.name for pod in mine) or 'not played'}"
        told: dict[tuple[str, str], dict[str, None]] = {}
        for pod in mine:
            for change in of_pod(pod):
                rule = rule_of(change)
                key = (rule.kind, rule.reason) if rule else ("UNEXPLAINED", "no rule allows it")
                told.setdefault(key, {})[change.path] = None
        for (kind, reason), paths in told.items():
            yield f"  {kind}: {reason}: {', '.join(_short(paths))}"
    for kind in sorted({str(m["kind"]) for m in rendered.manifests}):
        if kind in UNPLAYED:
            names = ", ".join(m["metadata"]["name"] for m in rendered.of(kind))
            yield f"podman has no {kind} ({names}): {UNPLAYED[kind]}"
    for name, reason in ignored(played):
        yield f"podman does nothing with {name}: {reason}"


def _short(paths: Iterable[str]) -> Iterator[str]:
    """Without the word that all begin with."""
    return (path.removeprefix("spec.") for path in paths)


def unknown_kinds(rendered: Rendered) -> list[str]:
    """Kinds that are neither played nor explained."""
    known = {*UNPLAYED, "ConfigMap"}
    return sorted({str(m["kind"]) for m in rendered.manifests} - known)


def ignored(played: Sequence[pods.PlayedPod]) -> list[tuple[str, str]]:
    """Fields of these pods that podman does nothing with."""
    found = {path for pod in played for path in _paths(pod.manifest["spec"])}
    return [
        (name, reason)
        for name, reason in IGNORED.items()
        if any(path == name or path.endswith(f".{name}") for path in found)
    ]


def _paths(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths without positions."""
    if path:
        yield path
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _paths(below, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for below in value:
            yield from _paths(below, path)
