"""Every check of the manifests finds what it is for: one thing is broken, one problem is told."""

import shutil
from pathlib import Path

import pytest

from deploy.k8s_check import (
    external,
    memory_checks,
    monitoring_checks,
    network_checks,
    object_checks,
    render,
)
from deploy.k8s_check.__main__ import CHECKS, names_do_not_clash
from deploy.k8s_check.objects import Rendered
from tests.unit.deploy import broken_memory, broken_objects, broken_pods
from tests.unit.deploy.manifests import Change, Check, container, get, overlay, remove, setting

BROKEN = broken_objects.BROKEN + broken_pods.BROKEN + broken_memory.BROKEN


@pytest.mark.parametrize("name", render.overlays())
def test_the_overlays_are_sound(name: str) -> None:
    """`make k8s-check` looks at the combinations too."""
    rendered = overlay(name)
    assert [problem for check in CHECKS for problem in check(rendered)] == []


@pytest.mark.parametrize(
    ("check", "change", "problem"),
    BROKEN,
    ids=[f"{check.__name__}-{problem}".replace(" ", "_") for check, _, problem in BROKEN],
)
def test_what_is_broken_is_told(check: Check, change: Change, problem: str) -> None:
    """By the check that it concerns."""
    rendered = overlay()
    change(rendered)
    assert [found for found in check(rendered) if problem in found]


def test_every_check_is_seen_to_fail() -> None:
    """Those with tests of their own are named here."""
    alone = {object_checks.names_are_unique}
    assert set(CHECKS) == {check for check, _, _ in BROKEN} | alone


def test_a_workload_without_a_budget_is_told() -> None:
    rendered = remove(overlay(), "PodDisruptionBudget", "gateway")
    problems = list(object_checks.updates_spare_devices(rendered))
    assert problems == ["Deployment gateway: 0 disruption budgets"]


def test_an_open_namespace_is_no_network_policy() -> None:
    """Without the component nothing is compared."""
    assert list(network_checks.policies_are_the_table(overlay("dev-cpu"))) == []


def test_two_models_do_not_clash() -> None:
    """And are told where they do."""
    both = [overlay("prod"), overlay("second-model")]
    assert list(names_do_not_clash(both)) == []
    further = both[1]
    deployment = get(further, "Deployment", "worker-second")
    deployment["metadata"]["name"] = "worker"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    labels["app.kubernetes.io/instance"] = "main"
    problems = "\n".join(names_do_not_clash(both))
    assert "Deployment worker stands 2 times" in problems
    assert "its selector takes ['Deployment worker', 'Deployment worker']" in problems


@pytest.mark.parametrize("name", ["prod", "second-model"])
def test_scalers_follow_the_namespace_of_the_overlay(name: str, tmp_path: Path) -> None:
    """Staging beside prod: the same model, another namespace."""
    folder = shutil.copytree(render.K8S, tmp_path / "k8s") / "overlays" / name
    path = folder / "kustomization.yaml"
    path.write_text(path.read_text().replace("namespace: quire", "namespace: staging"))
    rendered = render.render(folder, "staging")
    assert [found["metadata"]["namespace"] for found in rendered.of("ScaledObject")] == ["staging"]
    assert list(monitoring_checks.scalers_ask_for_their_model(rendered)) == []


def test_two_workers_need_no_patience() -> None:
    """The one that stays takes over."""
    rendered = overlay()
    setting(rendered, "QUIRE_WORKER_WAIT_S", "30")
    assert len(list(object_checks.lone_workers_are_waited_for(rendered))) == 1
    get(rendered, "ScaledObject", "worker")["spec"]["minReplicaCount"] = 2
    assert list(object_checks.lone_workers_are_waited_for(rendered)) == []


def test_names_stand_once() -> None:
    rendered = overlay()
    twice = Rendered(name="x", manifests=(*rendered.manifests, rendered.manifests[0]))
    assert len(list(object_checks.names_are_unique(twice))) == 1


def test_what_kubectl_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: [missing.yaml]\n")
    with pytest.raises(render.RenderError, match=r"missing\.yaml"):
        render.render(tmp_path, "broken")


@pytest.mark.parametrize(
    ("quantity", "gib"), [("512Mi", 0.5), ("2Gi", 2.0), ("1G", 0.931), ("1073741824", 1.0)]
)
def test_amounts_of_memory_are_read(quantity: str, gib: float) -> None:
    assert memory_checks.gib(quantity) == pytest.approx(gib, rel=1e-3)
    with pytest.raises(ValueError, match="no amount"):
        memory_checks.gib("2GiB")


def test_a_cpu_worker_may_take_what_its_settings_say() -> None:
    """And not more: the same settings with half of the memory are refused."""
    rendered = overlay("dev-cpu")
    assert list(memory_checks.workers_fit_their_memory(rendered)) == []
    limits = container(rendered, "worker")["resources"]["limits"]
    limits["memory"] = "2Gi"
    assert len(list(memory_checks.workers_fit_their_memory(rendered))) == 1


def test_every_pair_of_components_is_rendered() -> None:
    combinations = list(render.combinations())
    assert () in combinations
    names = {name for option in render.OPTIONS for name in option}
    folders = {
        str(path.parent.relative_to(render.K8S / "components"))
        for path in (render.K8S / "components").rglob("kustomization.yaml")
    }
    assert names | {"network-policies/model", "network-policies/redis"} == folders
    for one in names:
        for other in names:
            assert any({one, other} <= set(chosen) for chosen in combinations), (one, other)


def test_exceptions_from_checkov_have_reasons() -> None:
    found = external.exceptions()
    assert found
    assert all(len(reason.split()) > 8 for reason in found.values())
