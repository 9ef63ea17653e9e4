"""Pods as podman plays them, made from the rendered workloads. Pure.

podman has no namespaces, so that every name carries the run's prefix; it has no controllers, so
that the run makes a workload's pods itself, one by one. What is changed beside that has its reason
in `difference.RULES`, and a change without one ends the run.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.k8s_check.objects import Manifest, Rendered, Workload, ports, selects, workloads
from deploy.k8s_run.errors import RunError

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "quire-k8s-run"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
# podman removes the containers that ran before the others, which on a busy machine fails now and
# then because they still seem to run; with this they stay.
KEEP_INIT = ("io.podman.annotations.init.container.type", "always")
# What podman's kube play can put into a variable from the pod itself.
FIELDS = re.compile(r"metadata\.(name|uid|labels\[.*\]|annotations\[.*\])")
Secrets = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is played: a rendering, the prefix of all names, the Secrets by name and key."""

    rendered: Rendered
    prefix: str
    secrets: Secrets

    def name(self, name: str) -> str:
        """As it is called in podman."""
        return f"{self.prefix}-{name}"

    def workload(self, component: str) -> Workload:
        """The one of that component. Raises RunError."""
        for work in workloads(self.rendered):
            if work.component == component:
                return work
        raise RunError(f"the overlay renders no {component}")

    def num_pods(self, work: Workload) -> int:
        """As its object says, or the least that its autoscaler keeps."""
        for scaler in self.rendered.of("HorizontalPodAutoscaler"):
            target = scaler["spec"]["scaleTargetRef"]
            if target["name"] == work.manifest["metadata"]["name"]:
                return int(scaler["spec"].get("minReplicas", 1))
        return int(work.manifest["spec"].get("replicas", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPod:
    """One pod: its manifest for podman, the names it answers to, and what it was rendered as."""

    name: str
    work: Workload
    manifest: Manifest
    aliases: Sequence[str]

    @property
    def component(self) -> str:
        """gateway, scheduler, worker, redis or model-cache."""
        return self.work.component

    @property
    def grace_s(self) -> int:
        """Seconds between SIGTERM and SIGKILL."""
        return int(self.work.spec.get("terminationGracePeriodSeconds", 30))

    def container(self, position: int = 0) -> str:
        """As podman calls it."""
        return f"{self.name}-{self.work.containers[position]['name']}"

    def port(self, name: str) -> int:
        """Of its first container, by name."""
        return ports(self.work.containers[0])[name]


def expected(work: Workload) -> Manifest:
    """The pod as a cluster's controller would make it, but for its name."""
    template = work.manifest["spec"]["template"]
    metadata = {"labels": {}, "annotations": {}, **copy.deepcopy(template.get("metadata", {}))}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": copy.deepcopy(template["spec"]),
    }


def make(source: Source, work: Workload, number: int) -> PlayedPod:
    """The pod of that number. Raises RunError where podman can't play what is rendered."""
    name = source.name(f"{work.component}-{number}")
    manifest = expected(work)
    manifest["metadata"]["name"] = name
    manifest["metadata"]["labels"][MANAGED_BY] = MANAGER
    spec = manifest["spec"]
    if "initContainers" in spec:
        manifest["metadata"]["annotations"][KEEP_INIT[0]] = KEEP_INIT[1]
    renamed: dict[str, str] = {}
    for volume in spec.get("volumes", ()):
        _volume(source, name, volume, renamed)
    for claim in work.manifest["spec"].get("volumeClaimTemplates", ()):
        claimed = claim_name(work, claim, number)
        reference = {"claimName": source.name(claimed)}
        spec.setdefault("volumes", []).append(
            {"name": claim["metadata"]["name"], "persistentVolumeClaim": reference}
        )
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        _container(source, work, container)
        for mount in container.get("volumeMounts", ()):
            mount["name"] = renamed.get(mount["name"], mount["name"])
    return PlayedPod(name=name, work=work, manifest=manifest, aliases=aliases(source, work))


def _volume(source: Source, pod: str, volume: dict[str, Any], renamed: dict[str, str]) -> None:
    if "configMap" in volume:
        volume["configMap"]["name"] = source.name(volume["configMap"]["name"])
    elif "persistentVolumeClaim" in volume:
        claim = volume["persistentVolumeClaim"]
        claim["claimName"] = source.name(claim["claimName"])
    elif "secret" in volume:
        secret = volume.pop("secret")
        claim = source.name(secret_volume(secret["secretName"]))
        volume["persistentVolumeClaim"] = {"claimName": claim, "readOnly": True}
    elif "emptyDir" in volume:
        # Some versions of podman give it a volume of this very name, shared by all pods.
        renamed[volume["name"]] = volume["name"] = f"{pod}-{volume['name']}"


def _container(source: Source, work: Workload, container: dict[str, Any]) -> None:
    container.pop("ports", None)
    for probe in PROBES:
        container.pop(probe, None)
    for entry in container.get("envFrom", ()):
        entry["configMapRef"]["name"] = source.name(entry["configMapRef"]["name"])
    kept = []
    for entry in container.get("env", ()):
        found = entry.get("valueFrom", {})
        if "secretKeyRef" in found:
            value = _secret(source, work, found["secretKeyRef"])
            if value is None:
                continue
            del entry["valueFrom"]
            entry["value"] = value
        elif "configMapKeyRef" in found:
            found["configMapKeyRef"]["name"] = source.name(found["configMapKeyRef"]["name"])
        elif "fieldRef" in found and not FIELDS.fullmatch(found["fieldRef"]["fieldPath"]):
            path = found["fieldRef"]["fieldPath"]
            raise RunError(f"{work.name}: podman can't set {entry['name']} from {path}")
        kept.append(entry)
    if "env" in container:
        container["env"] = kept


def _secret(source: Source, work: Workload, reference: Mapping[str, Any]) -> str | None:
    value = source.secrets.get(reference["name"], {}).get(reference["key"])
    if value is None and not reference.get("optional"):
        raise RunError(f"{work.name}: no Secret {reference['name']} with {reference['key']}")
    return value


def aliases(source: Source, work: Workload) -> tuple[str, ...]:
    """Names of the Services that select its pods. Raises RunError where a port is translated."""
    found = []
    for service in source.rendered.of("Service"):
        if not selects({"matchLabels": service["spec"]["selector"]}, work.labels):
            continue
        listens = ports(work.containers[0])
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            if listens.get(target, target) != port["port"]:
                raise RunError(f"Service {service['metadata']['name']} translates {port['port']}")
        found.append(str(service["metadata"]["name"]))
    return tuple(found)


def config_maps(source: Source) -> list[Manifest]:
    """All ConfigMaps, by the names that the pods use."""
    found = []
    for config in source.rendered.of("ConfigMap"):
        name = source.name(config["metadata"]["name"])
        found.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name},
             "data": dict(config.get("data", {}))}
        )  # fmt: skip
    return found


def claim_name(work: Workload, claim: Mapping[str, Any], number: int) -> str:
    """What a StatefulSet's controller calls the claim of one of its pods."""
    return f"{claim['metadata']['name']}-{work.manifest['metadata']['name']}-{number}"


def secret_volume(name: str) -> str:
    """The volume that holds a Secret's files."""
    return f"secret-{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretVolume:
    """A volume to be made and filled before the pods: a file per key, as Kubernetes writes them."""

    name: str
    files: Mapping[str, str]
    mode: int
    group: int


def secret_volumes(source: Source) -> Iterator[SecretVolume]:
    """Of all workloads. Raises RunError for a Secret that is not there."""
    for work in workloads(source.rendered):
        for volume in work.spec.get("volumes", ()):
            if "secret" not in volume:
                continue
            secret = volume["secret"]
            if secret["secretName"] not in source.secrets:
                raise RunError(f"{work.name}: no Secret {secret['secretName']}")
            yield SecretVolume(
                name=source.name(secret_volume(secret["secretName"])),
                files=source.secrets[secret["secretName"]],
                mode=int(secret.get("defaultMode", 0o644)),
                group=int(work.spec.get("securityContext", {}).get("fsGroup", 0)),
            )


def claims(source: Source) -> list[str]:
    """Volumes that the overlay claims, by podman's names."""
    found = [m["metadata"]["name"] for m in source.rendered.of("PersistentVolumeClaim")]
    for work in workloads(source.rendered):
        for claim in work.manifest["spec"].get("volumeClaimTemplates", ()):
            found += [claim_name(work, claim, n) for n in range(source.num_pods(work))]
    return [source.name(name) for name in found]
