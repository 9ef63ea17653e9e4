"""The pods that podman plays are the rendered ones, but for changes that a rule explains."""

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.k8s_check.objects import Rendered, variables
from deploy.k8s_run import difference, honoured, images, overlay, pods
from deploy.k8s_run.__main__ import wanted
from deploy.k8s_run.errors import RunError
from tests.unit.deploy.manifests import get
from tests.unit.deploy.manifests import overlay as rendering

SECRETS = {
    "redis-urls": {role: f"redis://{role}:pw@redis" for role in ("gateway", "scheduler", "worker")},
    "redis-acl": {"users.acl": "user default off"},
    "quire-api-keys": {"keys": "default:00"},
}


def source_of(rendered: Rendered) -> pods.Source:
    """As a run would have it."""
    return pods.Source(rendered=rendered, prefix="run-x", secrets=SECRETS)


@pytest.fixture
def source() -> pods.Source:
    return source_of(rendering("dev-cpu"))


def make(source: pods.Source, component: str, number: int = 0) -> pods.PlayedPod:
    """The pod of a component."""
    return pods.make(source, source.workload(component), number)


def every_pod(source: pods.Source) -> list[pods.PlayedPod]:
    """One of each workload."""
    components = ("redis", "model-cache", "scheduler", "gateway", "worker")
    return [make(source, component) for component in components]


def main(pod: pods.PlayedPod) -> dict[str, Any]:
    """Its own container."""
    found: dict[str, Any] = pod.manifest["spec"]["containers"][0]
    return found


def test_names_carry_the_prefix_and_say_who_made_them(source: pods.Source) -> None:
    pod = make(source, "worker", 3)
    assert pod.name == pod.manifest["metadata"]["name"] == "run-x-worker-3"
    assert pod.manifest["metadata"]["labels"][pods.MANAGED_BY] == pods.MANAGER
    assert pod.container() == "run-x-worker-3-worker"


def test_what_podman_would_do_itself_is_taken_out(source: pods.Source) -> None:
    """Published ports, and probes by curl."""
    for pod in every_pod(source):
        for container in pod.manifest["spec"]["containers"]:
            assert not {"ports", *pods.PROBES} & container.keys()
    assert make(source, "gateway").port("http") == 8000


def test_pods_answer_to_the_services_that_select_them(source: pods.Source) -> None:
    found = {pod.component: pod.aliases for pod in every_pod(source)}
    assert found == {
        "redis": ("redis",),
        "gateway": ("gateway",),
        "model-cache": (),
        "scheduler": (),
        "worker": (),
    }


def test_a_service_that_translates_a_port_is_refused(source: pods.Source) -> None:
    """A name on a network can't do that."""
    get(source.rendered, "Service", "gateway")["spec"]["ports"][0]["port"] = 80
    with pytest.raises(RunError, match="Service gateway translates 80"):
        make(source, "gateway")


def test_secrets_are_put_in_place(source: pods.Source) -> None:
    gateway = make(source, "gateway")
    assert variables(source.rendered, main(gateway))["QUIRE_REDIS_URL"] == (
        "redis://gateway:pw@redis"
    )
    (keys,) = [v for v in gateway.manifest["spec"]["volumes"] if v["name"] == "api-keys"]
    claim = keys["persistentVolumeClaim"]["claimName"]
    (volume,) = [v for v in pods.secret_volumes(source) if v.name == claim]
    assert volume.files == SECRETS["quire-api-keys"]
    assert (volume.mode, volume.group) == (0o440, 10001)


def test_a_secret_that_is_not_there_is_told_unless_it_is_optional(source: pods.Source) -> None:
    assert "HF_TOKEN" not in [entry["name"] for entry in main(make(source, "model-cache"))["env"]]
    bare = replace(source, secrets={})
    with pytest.raises(RunError, match="no Secret redis-urls with worker"):
        make(bare, "worker")
    with pytest.raises(RunError, match="no Secret"):
        list(pods.secret_volumes(bare))


def test_empty_directories_are_the_pods_own(source: pods.Source) -> None:
    """Two pods never share one, and every mount still has its volume."""
    first, second = make(source, "worker", 0), make(source, "worker", 1)
    names = [{v["name"] for v in p.manifest["spec"]["volumes"] if "emptyDir" in v}
             for p in (first, second)]  # fmt: skip
    assert names[0]
    assert not names[0] & names[1]
    for pod in every_pod(source):
        spec = pod.manifest["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_claims_are_volumes_made_before(source: pods.Source) -> None:
    """Also the one that a StatefulSet's controller would make."""
    made = set(pods.claims(source)) | {v.name for v in pods.secret_volumes(source)}
    assert {"run-x-models", "run-x-data-redis-0"} < made
    for pod in every_pod(source):
        claimed = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod.manifest["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        }
        assert claimed <= made


def test_config_maps_are_found_by_their_new_names(source: pods.Source) -> None:
    configs = {config["metadata"]["name"]: config["data"] for config in pods.config_maps(source)}
    for pod in every_pod(source):
        spec = pod.manifest["spec"]
        named = [v["configMap"]["name"] for v in spec["volumes"] if "configMap" in v]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            named += [entry["configMapRef"]["name"] for entry in container.get("envFrom", ())]
        assert set(named) <= configs.keys()
    quire = get(source.rendered, "ConfigMap", "quire")
    assert configs[f"run-x-{quire['metadata']['name']}"] == quire["data"]


def test_a_field_that_podman_does_not_know_is_refused(source: pods.Source) -> None:
    entry = {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    source.workload("worker").spec["containers"][0]["env"].append(entry)
    with pytest.raises(RunError, match=r"ADDRESS from status\.podIP"):
        make(source, "worker")


def test_the_rendering_is_left_as_it_is(source: pods.Source) -> None:
    before = copy.deepcopy(source.rendered)
    every_pod(source)
    assert source.rendered == before


def test_as_many_pods_as_the_autoscaler_or_the_workload_says(source: pods.Source) -> None:
    counts = {c: source.num_pods(source.workload(c)) for c in ("gateway", "scheduler", "worker")}
    assert counts == {"gateway": 1, "scheduler": 2, "worker": 1}


def test_every_difference_of_the_overlay_is_explained(source: pods.Source) -> None:
    assert difference.unexplained(every_pod(source)) == []
    assert difference.unknown_kinds(source.rendered) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "containers", 0, "image"), "other"),
        (("spec", "containers", 0, "resources", "limits", "memory"), "64Gi"),
        (("spec", "containers", 0, "securityContext", "readOnlyRootFilesystem"), False),
        (("spec", "containers", 0, "volumeMounts", 0, "mountPath"), "/elsewhere"),
        (("spec", "securityContext", "runAsUser"), 0),
        (("spec", "hostNetwork"), True),
    ],
)
def test_any_other_difference_is_told(
    source: pods.Source, path: tuple[str | int, ...], value: object
) -> None:
    pod = make(source, "gateway")
    place: Any = pod.manifest
    for word in path[:-1]:
        place = place[word]
    place[path[-1]] = value
    (problem,) = difference.unexplained([pod])
    assert str(path[-1]) in problem


@pytest.mark.parametrize(
    ("component", "name", "change"),
    [
        ("worker", "QUIRE_WORKER_ID", lambda entry: entry.update(value="x", valueFrom=None)),
        ("worker", "QUIRE_WORKER_ID", lambda entry: entry.pop("valueFrom")),
        ("worker", "QUIRE_WORKER_ID", None),
        ("worker", "QUIRE_REDIS_URL", None),
        ("worker", "QUIRE_REDIS_URL", lambda entry: entry.update(valueFrom={})),
        ("worker", "NEW", lambda entry: entry.update(value="x")),
    ],
)
def test_a_variable_differs_only_where_it_came_from_a_secret(
    source: pods.Source, component: str, name: str, change: Any
) -> None:
    """One that is changed, dropped or added otherwise is told."""
    pod = make(source, component)
    entries = main(pod)["env"]
    found = [entry for entry in entries if entry["name"] == name]
    entry = found[0] if found else {"name": name}
    entries[:] = [other for other in entries if other is not entry]
    if change is not None:
        change(entry)
        entries.append(entry)
    problems = difference.unexplained([pod])
    assert problems
    assert all(f"env[{name}]" in problem for problem in problems)


def test_a_kind_of_which_nothing_is_said_is_told(source: pods.Source) -> None:
    new = {"kind": "CronJob", "metadata": {"name": "x"}}
    further = replace(source.rendered, manifests=(*source.rendered.manifests, new))
    assert difference.unknown_kinds(further) == ["CronJob"]


def test_the_report_names_all_and_shows_no_secret(source: pods.Source) -> None:
    text = "\n".join(difference.report(source.rendered, every_pod(source)))
    for line in (
        "Deployment worker: run-x-worker-0",
        "containers[worker].ports",
        "containers[worker].readinessProbe",
        "env[QUIRE_REDIS_URL]",
        "podman has no Service (gateway, redis)",
        "podman does nothing with topologySpreadConstraints",
    ):
        assert line in text
    assert ":pw@" not in text
    assert "UNEXPLAINED" not in text


@pytest.mark.parametrize("stub", [False, True])
def test_what_the_run_wants_is_rendered_by_kubectl(tmp_path: Path, stub: bool) -> None:
    bases = images.Bases(python=images.PYTHON, redis=images.OWN_REDIS)
    text, rendered = overlay.rendered(wanted(stub, bases, cores=4), tmp_path / "overlay")
    assert os.sep + "dev-cpu" in text
    source = source_of(rendered)
    worker = source.workload("worker")
    assert source.num_pods(worker) == 2
    found = variables(rendered, worker.containers[0])
    assert found.get("STUB_STEP_MS") == ("20" if stub else None)
    assert found.get("QUIRE_DETERMINISTIC") == (None if stub else "1")
    assert worker.containers[0]["image"] == (images.STUB if stub else images.own("worker"))
    for component in ("gateway", "scheduler"):
        (container,) = source.workload(component).containers
        assert container["image"] == images.own(component)
    assert source.workload("redis").containers[0]["image"] == images.OWN_REDIS
    assert difference.unexplained(every_pod(source)) == []


def inspected(**changed: object) -> dict[str, Any]:
    """What podman says of a gateway's container that is as its manifest wants it."""
    host = {
        "ReadonlyRootfs": True,
        "SecurityOpt": ["no-new-privileges"],
        "Memory": 1 << 30,
        "CpuPeriod": 100_000,
        "CpuQuota": 200_000,
    }
    found: dict[str, Any] = {"Config": {"User": "10001:10001"}, "EffectiveCaps": None}
    for name, value in changed.items():
        (host if name in host else found)[name] = value
    return {**found, "HostConfig": host}


def test_limits_and_rights_are_as_the_manifest_says(source: pods.Source) -> None:
    """Those of the overlay as it is rendered now."""
    pod = make(source, "gateway")
    limits = main(pod)["resources"]["limits"]
    assert (honoured.amount(limits["memory"]), honoured.amount(limits["cpu"])) == (1 << 30, 2)
    assert honoured.amount("500m") == 0.5
    assert list(honoured.broken(pod.manifest, "gateway", inspected())) == []


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"ReadonlyRootfs": False}, "can be written"),
        ({"SecurityOpt": []}, "gain privileges"),
        ({"Memory": 0}, "0 bytes of memory, not 1Gi"),
        ({"CpuQuota": 0}, "0 cores, not 2"),
        ({"EffectiveCaps": ["CAP_CHOWN"]}, "keeps CAP_CHOWN"),
        ({"Config": {"User": "0:0"}}, "runs as 0:0, not 10001"),
    ],
)
def test_what_podman_does_otherwise_is_told(
    source: pods.Source, changed: dict[str, object], problem: str
) -> None:
    pod = make(source, "gateway")
    (found,) = honoured.broken(pod.manifest, "gateway", inspected(**changed))
    assert problem in found
