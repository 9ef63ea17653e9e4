"""Checks between objects: names, selectors, who owns the number of replicas, budgets."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from deploy.k8s_check.objects import (
    Rendered,
    Workload,
    ports,
    selects,
    services,
    title,
    variables,
    workloads,
)
from deploy.k8s_check.pod_checks import budget_s

# Made by deploy/k8s/secrets.sh or by hand, with the keys that pods read.
SECRETS = {
    "redis-urls": {"gateway", "scheduler", "worker"},
    "redis-acl": {"users.acl"},
    "quire-api-keys": {"keys"},
}
COMPUTING_S = 60.0
# An update of the only worker: it hands over, its pod ends, the next one loads the model.
LEAST_WAIT_S = 600.0


def names_are_unique(rendered: Rendered) -> Iterator[str]:
    """Two objects of a kind and name would be one, whichever was applied last."""
    counted = Counter((m["kind"], m["metadata"]["name"]) for m in rendered.manifests)
    for (kind, name), count in counted.items():
        if count > 1:
            yield f"{kind} {name} stands {count} times"


def references_resolve(rendered: Rendered) -> Iterator[str]:
    """What pods name is rendered too, or is a Secret that the docs tell to make."""
    for work in workloads(rendered):
        account = work.spec.get("serviceAccountName", "")
        if rendered.find("ServiceAccount", account) is None:
            yield f"{work.name}: no ServiceAccount {account}"
        claims = {
            template["metadata"]["name"]
            for template in work.manifest["spec"].get("volumeClaimTemplates", ())
        }
        volumes = {volume["name"]: volume for volume in work.spec.get("volumes", ())}
        for volume in volumes.values():
            yield from _volume_resolves(rendered, work, volume)
        for container in work.all_containers:
            for mount in container.get("volumeMounts", ()):
                if mount["name"] not in volumes and mount["name"] not in claims:
                    yield f"{work.name}: mounts {mount['name']}, which is no volume of the pod"
            yield from _variables_resolve(rendered, work, container)


def _volume_resolves(
    rendered: Rendered, work: Workload, volume: Mapping[str, Any]
) -> Iterator[str]:
    if "configMap" in volume and rendered.find("ConfigMap", volume["configMap"]["name"]) is None:
        yield f"{work.name}: no ConfigMap {volume['configMap']['name']}"
    if "secret" in volume and volume["secret"]["secretName"] not in SECRETS:
        yield f"{work.name}: nobody makes the Secret {volume['secret']['secretName']}"
    claim = volume.get("persistentVolumeClaim", {}).get("claimName")
    if claim is not None and rendered.find("PersistentVolumeClaim", claim) is None:
        yield f"{work.name}: no PersistentVolumeClaim {claim}"


def _variables_resolve(
    rendered: Rendered, work: Workload, container: Mapping[str, Any]
) -> Iterator[str]:
    for source in container.get("envFrom", ()):
        name = source.get("configMapRef", {}).get("name", "")
        if rendered.find("ConfigMap", name) is None:
            yield f"{work.name}: no ConfigMap {name}"
    for entry in container.get("env", ()):
        source = entry.get("valueFrom", {})
        secret = source.get("secretKeyRef")
        needed = secret and not secret.get("optional")
        if needed and secret["key"] not in SECRETS.get(secret["name"], set()):
            yield f"{work.name}: nobody makes key {secret['key']} of Secret {secret['name']}"
        config = source.get("configMapKeyRef")
        if config:
            found = rendered.find("ConfigMap", config["name"])
            if found is None or config["key"] not in found.get("data", {}):
                yield f"{work.name}: no key {config['key']} in ConfigMap {config['name']}"


def selectors_take_their_own(rendered: Rendered) -> Iterator[str]:
    """Each selector takes the pods of one workload; a workload's own takes no other's."""
    found = [w for w in workloads(rendered) if w.manifest["kind"] != "Job"]
    for work in found:
        selector = work.manifest["spec"]["selector"]
        taken = [other.name for other in workloads(rendered) if selects(selector, other.labels)]
        if taken != [work.name]:
            yield f"{work.name}: its selector takes {taken}"
        for spread in work.spec.get("topologySpreadConstraints", ()):
            taken = [
                o.name for o in workloads(rendered) if selects(spread["labelSelector"], o.labels)
            ]
            if taken != [work.name]:
                yield f"{work.name}: its spread counts {taken}"
    for budget in rendered.of("PodDisruptionBudget"):
        taken = [w.name for w in found if selects(budget["spec"]["selector"], w.labels)]
        if len(taken) != 1:
            yield f"{title(budget)}: takes {taken}"
    for service in rendered.of("Service"):
        yield from _service_finds_ports(rendered, service)


def _service_finds_ports(rendered: Rendered, service: Mapping[str, Any]) -> Iterator[str]:
    selector = {"matchLabels": service["spec"].get("selector", {})}
    taken = [w for w in workloads(rendered) if selects(selector, w.labels)]
    if len(taken) != 1:
        yield f"{title(dict(service))}: takes {[w.name for w in taken]}"
        return
    known = ports(taken[0].containers[0])
    for port in service["spec"]["ports"]:
        target = port.get("targetPort", port["port"])
        number = known.get(target, target)
        if target not in known and target not in known.values():
            yield f"{title(dict(service))}: {taken[0].name} has no port {target}"
        elif number != port["port"]:
            yield f"{title(dict(service))}: port {port['port']} leads to {number}"


def one_owner_of_replicas(rendered: Rendered) -> Iterator[str]:
    """An autoscaler's target names no number; what has no autoscaler names one."""
    owners: dict[tuple[str, str], list[str]] = {}
    for scaler in rendered.of("HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        key = (target.get("kind", "Deployment"), target["name"])
        owners.setdefault(key, []).append(title(scaler))
        if rendered.find(*key) is None:
            yield f"{title(scaler)}: no {key[0]} {key[1]}"
    for manifest in rendered.of("Deployment", "StatefulSet"):
        owned = owners.get((manifest["kind"], manifest["metadata"]["name"]), [])
        has_number = "replicas" in manifest["spec"]
        if len(owned) > 1:
            yield f"{title(manifest)}: scaled by {owned}"
        if owned and has_number:
            yield f"{title(manifest)}: replicas is set, {owned[0]} owns it"
        if not owned and not has_number:
            yield f"{title(manifest)}: neither replicas nor an autoscaler"


def updates_spare_devices(rendered: Rendered) -> Iterator[str]:
    """Workers never surge; gateways and schedulers never fall below their number; all have a
    disruption budget."""
    for work in services(rendered):
        rolling = work.manifest["spec"].get("strategy", {}).get("rollingUpdate", {})
        expected = (0, 1) if work.component == "worker" else (1, 0)
        if (rolling.get("maxSurge"), rolling.get("maxUnavailable")) != expected:
            yield f"{work.name}: maxSurge, maxUnavailable must be {expected}"
    for work in workloads(rendered):
        if work.manifest["kind"] == "Job":
            continue
        budgets = [
            b
            for b in rendered.of("PodDisruptionBudget")
            if selects(b["spec"]["selector"], work.labels)
        ]
        if len(budgets) != 1:
            yield f"{work.name}: {len(budgets)} disruption budgets"
        for budget in budgets:
            # Kubernetes' default keeps pods that are not ready where they are, for ever.
            policy = budget["spec"].get("unhealthyPodEvictionPolicy")
            if policy != "AlwaysAllow":
                yield f"{title(budget)}: unhealthyPodEvictionPolicy must be AlwaysAllow"


def spreads_count_usable_nodes(rendered: Rendered) -> Iterator[str]:
    """A spread that may refuse a pod does not count nodes whose taints refuse it anyway."""
    for work in workloads(rendered):
        for spread in work.spec.get("topologySpreadConstraints", ()):
            refuses = spread["whenUnsatisfiable"] == "DoNotSchedule"
            if refuses and spread.get("nodeTaintsPolicy") != "Honor":
                yield f"{work.name}: its spread counts nodes with taints: nodeTaintsPolicy: Honor"


def lone_workers_are_waited_for(rendered: Rendered) -> Iterator[str]:
    """Where there may be one worker, each update takes it away: requests wait for the next one to
    load its model, and have time left to be computed then."""
    scalers = {
        scaler["spec"]["scaleTargetRef"]["name"]: scaler["spec"].get("minReplicaCount", 0)
        for scaler in rendered.of("ScaledObject")
    }
    for work in services(rendered):
        if work.component != "worker":
            continue
        least = scalers.get(
            work.manifest["metadata"]["name"], work.manifest["spec"].get("replicas")
        )
        if least is not None and least > 1:
            continue
        found = variables(rendered, work.containers[0])
        wait_s = float(found.get("QUIRE_WORKER_WAIT_S") or 30)
        life_s = float(found.get("QUIRE_DEFAULT_DEADLINE_S") or 600)
        if wait_s < LEAST_WAIT_S:
            yield f"{work.name}: may be alone, and requests wait {wait_s:g} s for the next"
        if life_s < wait_s + COMPUTING_S:
            yield f"{work.name}: requests live {life_s:g} s, and wait {wait_s:g} for a worker"


def from_zero_waits_for_a_worker(rendered: Rendered) -> Iterator[str]:
    """Where no worker may run, a request must wait longer than the first one's start."""
    for scaler in rendered.of("ScaledObject"):
        if scaler["spec"].get("minReplicaCount", 0) != 0:
            continue
        target = scaler["spec"]["scaleTargetRef"]["name"]
        for work in services(rendered):
            if work.manifest["metadata"]["name"] != target:
                continue
            found = variables(rendered, work.containers[0])
            wait_s = float(found.get("QUIRE_WORKER_WAIT_S") or 30)
            start_s = budget_s(work.containers[0].get("startupProbe", {}))
            if wait_s < start_s:
                yield f"{work.name}: may take {start_s:g} s to start, requests wait {wait_s:g}"


def everything_is_labelled(rendered: Rendered) -> Iterator[str]:
    """Pods carry part-of, component and instance, by which models are told apart."""
    for work in workloads(rendered):
        needed = ["part-of", "component"] + (["instance"] if work.component != "redis" else [])
        for word in needed:
            if f"app.kubernetes.io/{word}" not in work.labels and not _bare(rendered, word):
                yield f"{work.name}: no label app.kubernetes.io/{word}"


def _bare(rendered: Rendered, word: str) -> bool:
    """Components on the bare base have no overlay that names the instance of the Job."""
    return word == "instance" and rendered.name.startswith("base")


CHECKS = (
    names_are_unique,
    references_resolve,
    selectors_take_their_own,
    one_owner_of_replicas,
    updates_spare_devices,
    spreads_count_usable_nodes,
    lone_workers_are_waited_for,
    from_zero_waits_for_a_worker,
    everything_is_labelled,
)
