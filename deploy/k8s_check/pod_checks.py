"""Checks of what runs in pods: variables, ports, probes, life cycle, rights, images.

Every check takes one rendering and gives its problems, each a sentence that names the object.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy.k8s_check import code_facts
from deploy.k8s_check.objects import (
    SERVICES,
    Rendered,
    Workload,
    ports,
    services,
    variables,
    workloads,
)
from servicekit.settings import PREFIX

ROOT = Path(__file__).resolve().parents[2]
AFTER_DRAIN_S = 5.0
LEAST_MODEL_LOAD_S = 1200.0
PORT_NAMES = {
    "gateway": {"http": "QUIRE_PORT", "grpc": "QUIRE_GRPC_PORT", "ops": "QUIRE_OPS_PORT"},
    "scheduler": {"scheduler": "QUIRE_SCHEDULER_PORT", "ops": "QUIRE_OPS_PORT"},
    "worker": {"worker": "QUIRE_WORKER_PORT", "ops": "QUIRE_OPS_PORT"},
}
READY_PATH = "/health/ready"
DEFAULTS = {"periodSeconds": 10.0, "failureThreshold": 3.0, "timeoutSeconds": 1.0}


def variables_are_settings(rendered: Rendered) -> Iterator[str]:
    """A name that no service knows stops the process; so does a value that does not parse."""
    known = code_facts.settings()
    for work in services(rendered):
        service = SERVICES[work.component]
        for container in work.containers:
            own = {entry["name"] for entry in container.get("env", ())}
            for name, value in variables(rendered, container).items():
                if not name.startswith(PREFIX):
                    continue
                if name not in known:
                    yield f"{work.name}: {name} is no setting of any service"
                    continue
                if name in own and service not in known[name].services:
                    yield f"{work.name}: {name} is set for {work.component}, which does not read it"
                if value is None or value == "":
                    continue
                try:
                    known[name].parse(value)
                except ValueError as error:
                    yield f"{work.name}: {name}={value}: {error}"


def settings_fit_the_pod(rendered: Rendered) -> Iterator[str]:
    """Keys, model and addresses are where the settings say."""
    for work in services(rendered):
        container = work.containers[0]
        found = variables(rendered, container)
        mounts = {mount["mountPath"].rstrip("/") for mount in container.get("volumeMounts", ())}
        if found.get("QUIRE_HOST") in (None, "", "127.0.0.1", "localhost", "::1"):
            yield f"{work.name}: listens on loopback, where no probe reaches it"
        if "QUIRE_REDIS_URL" not in found:
            yield f"{work.name}: no QUIRE_REDIS_URL"
        if work.component == "gateway":
            keys = found.get("QUIRE_API_KEYS_FILE") or ""
            if not keys or str(Path(keys).parent) not in mounts:
                yield f"{work.name}: no volume holds QUIRE_API_KEYS_FILE={keys}"
        model = found.get("QUIRE_MODEL") or ""
        if work.component != "scheduler" and model.startswith("/"):
            parents = {str(parent) for parent in Path(model).parents}
            if not parents & (mounts - {"/tmp", "/cache"}):
                yield f"{work.name}: no volume holds QUIRE_MODEL={model}"
        if work.component == "worker" and "QUIRE_WORKER_ADDRESS" in found:
            # It finds its pod's own: one that is written here would be the same for all of them.
            yield f"{work.name}: QUIRE_WORKER_ADDRESS must be left to the pod"


def ports_are_listeners(rendered: Rendered) -> Iterator[str]:
    """Container ports are exactly those that the settings make the process listen on."""
    for work in services(rendered):
        container = work.containers[0]
        found = variables(rendered, container)
        expected = {
            name: int(found.get(variable) or 0)
            for name, variable in PORT_NAMES[work.component].items()
        }
        if ports(container) != expected:
            yield f"{work.name}: ports {ports(container)}, the settings say {expected}"
        if 0 in expected.values():
            yield f"{work.name}: a port of 0 is a free one, which nothing could find"


def probes_ask_what_there_is(rendered: Rendered) -> Iterator[str]:
    """Three probes each, on routes and ports that the process serves."""
    routes = code_facts.ops_routes()
    for work in services(rendered):
        container = work.containers[0]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container.get(kind, {}).get("httpGet")
            if asked is None:
                yield f"{work.name}: no {kind} by HTTP"
                continue
            number = ports(container).get(asked["port"], asked["port"])
            if number != ports(container).get("ops"):
                yield f"{work.name}: {kind} asks port {asked['port']}, health is on ops"
            if asked["path"] not in routes:
                yield f"{work.name}: {kind} asks {asked['path']}, which the ops port does not serve"
        live = container.get("livenessProbe", {})
        if live.get("httpGet", {}).get("path") != "/health":
            yield f"{work.name}: liveness must be /health: nothing else's health may end a process"
        if budget_s(live) < 30 or _field(live, "timeoutSeconds") < 5:
            yield f"{work.name}: liveness is stricter than a busy loop deserves"
        path = container.get("readinessProbe", {}).get("httpGet", {}).get("path")
        if path != READY_PATH:
            yield f"{work.name}: readiness must be {READY_PATH}"
        start_s = budget_s(container.get("startupProbe", {}))
        if work.component == "worker" and start_s < LEAST_MODEL_LOAD_S:
            yield f"{work.name}: {start_s:g} s to load a model, at least {LEAST_MODEL_LOAD_S:g}"


def _field(probe: Mapping[str, Any], name: str) -> float:
    return float(probe.get(name, DEFAULTS[name]))


def budget_s(probe: Mapping[str, Any]) -> float:
    """Seconds until a probe that never succeeds has failed."""
    return _field(probe, "periodSeconds") * _field(probe, "failureThreshold")


def grace_covers_the_drain(rendered: Rendered) -> Iterator[str]:
    """terminationGracePeriodSeconds = preStop + QUIRE_DRAIN_S + 5."""
    for work in services(rendered):
        found = variables(rendered, work.containers[0])
        drain = found.get("QUIRE_DRAIN_S")
        drain_s = float(drain) if drain else float(code_facts.settings()["QUIRE_DRAIN_S"].default)
        hook = work.containers[0].get("lifecycle", {}).get("preStop", {})
        pre_stop_s = _pre_stop_s(hook)
        if work.component == "gateway" and pre_stop_s < 5:
            yield f"{work.name}: endpoints need some seconds in preStop to forget the pod"
        expected = pre_stop_s + drain_s + AFTER_DRAIN_S
        grace = float(work.spec.get("terminationGracePeriodSeconds", 30))
        if grace != expected:
            yield (
                f"{work.name}: grace {grace:g} s, but preStop {pre_stop_s:g} + drain {drain_s:g} "
                f"+ {AFTER_DRAIN_S:g} = {expected:g}"
            )


def _pre_stop_s(hook: Mapping[str, Any]) -> float:
    if "sleep" in hook:
        return float(hook["sleep"]["seconds"])
    command = hook.get("exec", {}).get("command", ())
    if len(command) == 2 and command[0] == "sleep":
        return float(command[1])
    return 0.0


def pods_are_restricted(rendered: Rendered) -> Iterator[str]:
    """The restricted profile of Pod Security, a read-only root, no token, no service links."""
    for work in workloads(rendered):
        spec = work.spec
        if spec.get("enableServiceLinks") is not False:
            yield f"{work.name}: enableServiceLinks must be false, or QUIRE_ variables appear"
        if spec.get("automountServiceAccountToken") is not False:
            yield f"{work.name}: a token is mounted that nothing uses"
        if not spec.get("serviceAccountName"):
            yield f"{work.name}: no ServiceAccount of its own"
        pod = spec.get("securityContext", {})
        if pod.get("runAsNonRoot") is not True or not pod.get("runAsUser"):
            yield f"{work.name}: may run as root"
        if pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{work.name}: no seccomp profile"
        if any("hostPath" in volume for volume in spec.get("volumes", ())):
            yield f"{work.name}: mounts a path of the node"
        if any(spec.get(word) for word in ("hostNetwork", "hostPID", "hostIPC")):
            yield f"{work.name}: shares a namespace of the node"
        for container in work.all_containers:
            yield from _container_is_restricted(work, container)


def _container_is_restricted(work: Workload, container: Mapping[str, Any]) -> Iterator[str]:
    name = f"{work.name}, {container['name']}"
    context = container.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: may gain privileges"
    if context.get("readOnlyRootFilesystem") is not True:
        yield f"{name}: the root file system can be written"
    if context.get("capabilities", {}).get("drop") != ["ALL"]:
        yield f"{name}: keeps capabilities"
    for part in ("requests", "limits"):
        missing = {"cpu", "memory"} - set(container.get("resources", {}).get(part, {}))
        if missing:
            yield f"{name}: no {' and '.join(sorted(missing))} in {part}"


def caches_can_be_written(rendered: Rendered) -> Iterator[str]:
    """With a read-only root, what the images and variables name as caches are volumes."""
    for work in services(rendered):
        container = work.containers[0]
        writable = {
            mount["mountPath"].rstrip("/")
            for mount in container.get("volumeMounts", ())
            if not mount.get("readOnly")
        }
        needed = {"HOME": "", "TRITON_CACHE_DIR": "", "HF_HOME": "", "TMPDIR": "/tmp"}
        needed.update(image_variables(work.component))
        needed.update({k: v or "" for k, v in variables(rendered, container).items()})
        for name in ("HOME", "TRITON_CACHE_DIR", "HF_HOME", "TMPDIR"):
            path = needed[name]
            if path and not any(path == m or path.startswith(m + "/") for m in writable):
                yield f"{work.name}: {name}={path} can't be written"


def images_are_ours(rendered: Rendered) -> Iterator[str]:
    """Tagged with the version, built by a Dockerfile that is there, run as the user it names."""
    for work in workloads(rendered):
        for container in work.all_containers:
            name, _, tag = container["image"].rpartition(":")
            if not name or tag == "latest":
                yield f"{work.name}: {container['image']} has no tag"
            if not name.startswith("quire/"):
                continue
            if tag.split("-")[0] != code_facts.version():
                yield f"{work.name}: {container['image']}, but this is {code_facts.version()}"
            if not dockerfile(name.removeprefix("quire/")).is_file():
                yield f"{work.name}: no Dockerfile makes {name}"
    for work in services(rendered):
        text = dockerfile(work.component).read_text()
        user = work.spec.get("securityContext", {}).get("runAsUser")
        if f"USER {user}:" not in text:
            yield f"{work.name}: runs as {user}, its image is made for another user"
        exposed = next(line.split()[1:] for line in text.splitlines() if line.startswith("EXPOSE"))
        if {str(port) for port in ports(work.containers[0]).values()} != set(exposed):
            yield f"{work.name}: its image exposes {' '.join(exposed)}"
        if f'image.version="{code_facts.version()}"' not in text:
            yield f"{work.name}: its image's label does not say {code_facts.version()}"
        module = SERVICES[work.component]
        if f'ENTRYPOINT ["python", "-m", "{module}"]' not in text:
            yield f"{work.name}: its image does not start {module}"


def dockerfile(image: str) -> Path:
    """Of one of our images."""
    return ROOT / "deploy" / "docker" / f"{image}.Dockerfile"


def image_variables(image: str) -> dict[str, str]:
    """ENV of the last stage of an image."""
    last = dockerfile(image).read_text().split("\nFROM ")[-1].replace("\\\n", " ")
    found: dict[str, str] = {}
    for line in last.splitlines():
        if line.startswith("ENV "):
            found.update(word.split("=", 1) for word in line[4:].split())  # type: ignore[misc]
    return found


CHECKS = (
    variables_are_settings,
    settings_fit_the_pod,
    ports_are_listeners,
    probes_ask_what_there_is,
    grace_covers_the_drain,
    pods_are_restricted,
    caches_can_be_written,
    images_are_ours,
)
