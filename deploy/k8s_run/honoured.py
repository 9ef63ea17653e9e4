"""Whether podman has given a container the limits and rights that its manifest says. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def amount(quantity: object) -> float:
    """Kubernetes' notation of a number: 500m, 2, 8Gi."""
    text = str(quantity)
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    if text.endswith("m"):
        return float(text.removesuffix("m")) / 1000
    return float(text)


def broken(pod: Mapping[str, Any], name: str, inspected: Mapping[str, Any]) -> Iterator[str]:
    """What differs for the pod's container of that name; `inspected` is podman's document."""
    spec = pod["spec"]
    (container,) = (
        c for c in (*spec.get("initContainers", ()), *spec["containers"]) if c["name"] == name
    )
    host, config = inspected["HostConfig"], inspected["Config"]
    context = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
    limits = container.get("resources", {}).get("limits", {})
    wanted_user = str(context["runAsUser"]) if "runAsUser" in context else ""
    if wanted_user and str(config["User"]).partition(":")[0] != wanted_user:
        yield f"runs as {config['User']}, not {wanted_user}"
    if context.get("readOnlyRootFilesystem") and not host["ReadonlyRootfs"]:
        yield "its root file system can be written"
    if context.get("allowPrivilegeEscalation") is False:
        options = host.get("SecurityOpt") or ()
        if not any(str(option).startswith("no-new-privileges") for option in options):
            yield "may gain privileges"
    if "ALL" in context.get("capabilities", {}).get("drop", ()) and inspected["EffectiveCaps"]:
        yield f"keeps {', '.join(inspected['EffectiveCaps'])}"
    if "memory" in limits and host["Memory"] != int(amount(limits["memory"])):
        yield f"may use {host['Memory']} bytes of memory, not {limits['memory']}"
    if "cpu" in limits:
        cores = host["CpuQuota"] / host["CpuPeriod"] if host["CpuPeriod"] else 0.0
        if abs(cores - amount(limits["cpu"])) > 0.01:
            yield f"may use {cores:g} cores, not {limits['cpu']}"
