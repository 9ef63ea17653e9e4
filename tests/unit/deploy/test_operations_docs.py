"""What docs/operations tells a new user to type and to look for is there."""

import re
from pathlib import Path

import pytest

from deploy.k8s_check import memory_checks, object_checks, render
from deploy.k8s_check.objects import workloads
from tests.unit.deploy.manifests import overlay

ROOT = Path(__file__).resolve().parents[3]
OPERATIONS = ROOT / "docs" / "operations"
INSTALL = (OPERATIONS / "install.md").read_text()
README = (ROOT / "README.md").read_text()
KINDS = (
    "Deployment", "Service", "StatefulSet", "Job", "PersistentVolumeClaim", "PodDisruptionBudget",
)  # fmt: skip


def section(text: str, title: str) -> str:
    """A chapter of second rank."""
    return text.split(f"\n## {title}\n")[1].split("\n## ", maxsplit=1)[0]


def commands(text: str) -> list[str]:
    """Of the first block of code."""
    return text.split("```")[1].strip().splitlines()


def test_five_commands_and_the_same_in_both_places() -> None:
    short = commands(section(README, "Kubernetes"))
    assert len(short) == 5
    assert short == commands(section(INSTALL, "Five commands"))
    for line in short:
        for path in re.findall(r"\bdeploy/\S+", line):
            assert (ROOT / path).exists(), path


def test_objects_of_the_docs_are_rendered() -> None:
    """By the overlay that the commands apply."""
    text = section(INSTALL, "What stands there then")
    rendered = overlay("dev-cpu")
    named = []
    for kind, names in re.findall(rf"({'|'.join(KINDS)}) (`[a-z-]+`(?:, `[a-z-]+`)*)", text):
        named += [(kind, name) for name in re.findall(r"`([a-z-]+)`", names)]
    assert len(named) >= 11
    assert [pair for pair in named if rendered.find(*pair) is None] == []
    configs = [m["metadata"]["name"] for m in rendered.of("ConfigMap")]
    assert any(re.fullmatch(r"quire-[a-z0-9]{10}", name) for name in configs)


def test_objects_that_are_rendered_are_in_the_docs() -> None:
    """But ServiceAccounts, ConfigMaps and what belongs to one that is named."""
    text = section(INSTALL, "What stands there then")
    for manifest in overlay("dev-cpu").of(*KINDS):
        assert f"`{manifest['metadata']['name']}`" in text


def test_what_dev_cpu_asks_for_fits_the_machine_of_the_docs() -> None:
    """With a quarter left for what else runs on a node. The Job counts: were there no room for it,
    those that wait for the model would wait for ever.
    """
    found = re.search(r"^\| `dev-cpu` .* (\d+) cores, (\d+) GiB \|$", INSTALL, re.MULTILINE)
    assert found is not None
    cores = memory = 0.0
    for work in workloads(overlay("dev-cpu")):
        replicas = work.manifest["spec"].get("replicas", 1)
        for container in work.containers:
            asked = container["resources"]["requests"]
            cpu = str(asked["cpu"])
            cores += replicas * (float(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu))
            memory += replicas * memory_checks.gib(asked["memory"])
    assert cores <= 0.75 * int(found[1])
    assert memory <= 0.75 * int(found[2])


def test_overlays_and_secrets_of_the_docs_are_all() -> None:
    table = section(INSTALL, "Overlays")
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.MULTILINE) == sorted(
        render.overlays(), key=["dev-cpu", "single-gpu", "prod", "second-model"].index
    )
    secrets = re.findall(r"^\| `([a-z-]+)` \| `", section(INSTALL, "Five commands"), re.MULTILINE)
    assert set(secrets) == {*object_checks.SECRETS, "hub-token"}


@pytest.mark.parametrize("path", sorted(render.K8S.glob("components/*/")), ids=lambda p: p.name)
def test_each_component_says_what_it_is_for(path: Path) -> None:
    assert (path / "README.md").read_text().startswith(f"# {path.name}\n")


def named_in_commands(text: str) -> set[tuple[str, str]]:
    """Kind and name of the objects that commands of the docs are about."""
    kinds = "deployment|service|pod|job|secret|statefulset"
    return {
        (kind, name)
        for line in re.findall(r"kubectl [^`\n]+", text)
        for kind, name in re.findall(rf"\b({kinds})[ /]([a-z][a-z0-9-]+)", line)
    }


@pytest.mark.parametrize("path", sorted(OPERATIONS.glob("*.md")), ids=lambda p: p.name)
def test_objects_of_commands_are_rendered(path: Path) -> None:
    """In every page: whatever somebody is told to type is about something that is there."""
    rendered = overlay("prod")
    there = {(m["kind"].lower(), m["metadata"]["name"]) for m in rendered.manifests}
    there |= {("secret", name) for name in (*object_checks.SECRETS, "hub-token")}
    there |= {("pod", f"{m['metadata']['name']}-0") for m in rendered.of("StatefulSet")}
    assert named_in_commands(path.read_text()) - there == set()


def test_commands_of_the_docs_are_read() -> None:
    """So that the test above has something to look at."""
    found = set().union(*(named_in_commands(p.read_text()) for p in OPERATIONS.glob("*.md")))
    assert {("pod", "redis-0"), ("job", "model-cache"), ("deployment", "worker")} <= found
    assert {("service", "gateway"), ("secret", "quire-api-keys")} <= found
