"""What may be wrong with a pod, each with the check that must find it and what it must say."""

from deploy.k8s_check import pod_checks
from tests.unit.deploy.manifests import Change, Check, container, pod, setting, variable

BROKEN: list[tuple[Check, Change, str]] = [
    # variables
    (
        pod_checks.variables_are_settings,
        lambda r: setting(r, "QUIRE_WORKER_PORTS", "9300"),
        "QUIRE_WORKER_PORTS is no setting",
    ),
    (
        pod_checks.variables_are_settings,
        lambda r: setting(r, "QUIRE_BLOCK_SIZE", "3"),
        "QUIRE_BLOCK_SIZE=3: must be from 4 to 128",
    ),
    (
        pod_checks.variables_are_settings,
        lambda r: variable(r, "gateway", "QUIRE_BLOCK_SIZE", "16"),
        "QUIRE_BLOCK_SIZE is set for gateway, which does not read it",
    ),
    (
        pod_checks.settings_fit_the_pod,
        lambda r: setting(r, "QUIRE_HOST", "127.0.0.1"),
        "listens on loopback",
    ),
    (
        pod_checks.settings_fit_the_pod,
        lambda r: setting(r, "QUIRE_API_KEYS_FILE", "/etc/keys"),
        "no volume holds QUIRE_API_KEYS_FILE",
    ),
    (
        pod_checks.settings_fit_the_pod,
        lambda r: setting(r, "QUIRE_MODEL", "/weights/m"),
        "no volume holds QUIRE_MODEL",
    ),
    (
        pod_checks.settings_fit_the_pod,
        lambda r: variable(r, "worker", "QUIRE_WORKER_ADDRESS", "worker:9300"),
        "QUIRE_WORKER_ADDRESS must be left to the pod",
    ),
    (
        pod_checks.settings_fit_the_pod,
        lambda r: container(r, "scheduler").pop("env"),
        "no QUIRE_REDIS_URL",
    ),
    # ports and probes
    (
        pod_checks.ports_are_listeners,
        lambda r: container(r, "gateway")["ports"][0].update(containerPort=8080),
        "the settings say",
    ),
    (
        pod_checks.ports_are_listeners,
        lambda r: setting(r, "QUIRE_SCHEDULER_PORT", "0"),
        "a port of 0",
    ),
    (
        pod_checks.probes_ask_what_there_is,
        lambda r: container(r, "worker")["startupProbe"]["httpGet"].update(path="/healthz"),
        "/healthz, which the ops port does not serve",
    ),
    (
        pod_checks.probes_ask_what_there_is,
        lambda r: container(r, "gateway")["readinessProbe"]["httpGet"].update(port="http"),
        "health is on ops",
    ),
    (
        pod_checks.probes_ask_what_there_is,
        lambda r: container(r, "scheduler").pop("startupProbe"),
        "no startupProbe",
    ),
    (
        pod_checks.probes_ask_what_there_is,
        lambda r: container(r, "worker")["livenessProbe"]["httpGet"].update(path="/health/ready"),
        "liveness must be /health",
    ),
    (
        pod_checks.probes_ask_what_there_is,
        lambda r: container(r, "worker").update(
            livenessProbe={"httpGet": {"path": "/health", "port": "ops"}}
        ),
        "stricter than a busy loop deserves",
    ),
    (
        pod_checks.probes_ask_what_there_is,
        lambda r: container(r, "scheduler")["readinessProbe"]["httpGet"].update(path="/health"),
        "Deployment scheduler: readiness must be /health/ready",
    ),
    (
        pod_checks.probes_ask_what_there_is,
        lambda r: container(r, "worker")["startupProbe"].update(failureThreshold=30),
        "150 s to load a model",
    ),
    # the end of a pod
    (
        pod_checks.grace_covers_the_drain,
        lambda r: pod(r, "worker").update(terminationGracePeriodSeconds=30),
        "grace 30 s, but preStop 0 + drain 30 + 5 = 35",
    ),
    (
        pod_checks.grace_covers_the_drain,
        lambda r: setting(r, "QUIRE_DRAIN_S", "60"),
        "grace 35 s, but preStop 0 + drain 60 + 5 = 65",
    ),
    (
        pod_checks.grace_covers_the_drain,
        lambda r: container(r, "gateway").pop("lifecycle"),
        "endpoints need some seconds",
    ),
    # rights
    (
        pod_checks.pods_are_restricted,
        lambda r: pod(r, "gateway").pop("enableServiceLinks"),
        "enableServiceLinks must be false",
    ),
    (
        pod_checks.pods_are_restricted,
        lambda r: pod(r, "redis", "StatefulSet").pop("automountServiceAccountToken"),
        "a token is mounted",
    ),
    (
        pod_checks.pods_are_restricted,
        lambda r: pod(r, "worker")["securityContext"].update(runAsNonRoot=False),
        "may run as root",
    ),
    (
        pod_checks.pods_are_restricted,
        lambda r: pod(r, "worker")["securityContext"].pop("seccompProfile"),
        "no seccomp profile",
    ),
    (
        pod_checks.pods_are_restricted,
        lambda r: pod(r, "worker")["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
        "mounts a path of the node",
    ),
    (
        pod_checks.pods_are_restricted,
        lambda r: pod(r, "worker").update(hostNetwork=True),
        "shares a namespace of the node",
    ),
    (
        pod_checks.pods_are_restricted,
        lambda r: container(r, "scheduler")["securityContext"].pop("allowPrivilegeEscalation"),
        "may gain privileges",
    ),
    (
        pod_checks.pods_are_restricted,
        lambda r: pod(r, "gateway")["initContainers"][0]["securityContext"].pop(
            "readOnlyRootFilesystem"
        ),
        "wait-for-model: the root file system can be written",
    ),
    (
        pod_checks.pods_are_restricted,
        lambda r: container(r, "gateway")["securityContext"].update(capabilities={}),
        "keeps capabilities",
    ),
    (
        pod_checks.pods_are_restricted,
        lambda r: container(r, "gateway")["resources"]["limits"].pop("memory"),
        "no memory in limits",
    ),
    (
        pod_checks.caches_can_be_written,
        lambda r: container(r, "worker").update(
            volumeMounts=[{"name": "tmp", "mountPath": "/tmp"}]
        ),
        "TRITON_CACHE_DIR=/cache/triton can't be written",
    ),
    # images
    (
        pod_checks.images_are_ours,
        lambda r: container(r, "gateway").update(image="quire/gateway:0.0.9"),
        "quire/gateway:0.0.9, but this is",
    ),
    (
        pod_checks.images_are_ours,
        lambda r: container(r, "gateway").update(image="quire/gate:0.1.0"),
        "no Dockerfile makes quire/gate",
    ),
    (
        pod_checks.images_are_ours,
        lambda r: container(r, "gateway").update(image="quire/gateway:latest"),
        "has no tag",
    ),
    (
        pod_checks.images_are_ours,
        lambda r: pod(r, "worker")["securityContext"].update(runAsUser=1000),
        "its image is made for another user",
    ),
    (
        pod_checks.images_are_ours,
        lambda r: container(r, "worker")["ports"].pop(),
        "its image exposes",
    ),
]
