"""The parts of `make k8s-run` that need no podman: probes, answers, packages, results, cleaning."""

import json
import os
import shutil
from pathlib import Path

import pytest

from deploy.k8s_run import __main__ as k8s_run
from deploy.k8s_run import machine, mirrors, pods, probes, scenario, secret_files
from deploy.k8s_run.deadline import Deadline
from deploy.k8s_run.errors import NotPossibleError, RunError, first
from deploy.k8s_run.load import Answer, Job
from deploy.k8s_run.podman import NUM_REMOVALS, Podman, PodmanError
from tests.unit.deploy.manifests import container, overlay
from tests.unit.deploy.test_k8s_run_pods import source_of

JOB = Job(prompt="p", num_tokens=3, seed=1)


async def never(command: tuple[str, ...], timeout_s: float) -> str:
    """No probe is asked here."""
    raise AssertionError(command)


def watch() -> tuple[probes.Watch, dict[str, probes.Probe]]:
    """Of the gateway's container, and its probes by kind."""
    gateway = container(overlay("dev-cpu"), "gateway")
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")
    found = {kind: probe for kind in kinds if (probe := probes.read(gateway, kind)) is not None}
    return probes.Watch("gateway-0", gateway, "address", never), found


def test_probes_are_read_as_the_manifest_says() -> None:
    _, found = watch()
    startup = found["startupProbe"]
    assert (startup.path, startup.port, startup.period_s) == ("/health", 9100, 2.0)
    assert startup.budget_s == 300.0
    assert found["readinessProbe"].path == "/health/ready"


def test_a_container_is_ready_when_it_has_started_and_says_so() -> None:
    seen, found = watch()
    seen.tell(found["startupProbe"], "refused")
    assert not seen.started
    seen.tell(found["startupProbe"], "")
    assert seen.started
    assert not seen.ready
    seen.tell(found["readinessProbe"], "")
    assert seen.ready
    assert seen.problems == []


def test_failures_count_only_in_a_row() -> None:
    seen, found = watch()
    readiness = found["readinessProbe"]
    seen.tell(found["startupProbe"], "")
    seen.tell(readiness, "")
    for _ in range(3):
        for _ in range(readiness.num_failures - 1):
            seen.tell(readiness, "503")
        seen.tell(readiness, "")
    assert seen.ready
    for _ in range(readiness.num_failures):
        seen.tell(readiness, "503")
    assert not seen.ready
    (problem,) = seen.problems
    assert problem == "gateway-0: 2 times in a row: readinessProbe: 503"


def test_a_container_that_is_not_live_is_a_problem() -> None:
    """A kubelet would restart it under its clients."""
    seen, found = watch()
    for _ in range(found["livenessProbe"].num_failures):
        seen.tell(found["livenessProbe"], "timed out")
    assert len(seen.problems) == 1


def test_a_container_that_never_starts_is_given_up() -> None:
    seen, found = watch()
    for _ in range(found["startupProbe"].num_failures):
        seen.tell(found["startupProbe"], "refused")
    assert seen.given_up


def test_what_is_ended_on_purpose_is_no_problem() -> None:
    seen, found = watch()
    seen.tell(found["startupProbe"], "")
    seen.tell(found["readinessProbe"], "")
    seen.restarted()
    assert not seen.ready
    seen.leave()
    for kind in ("readinessProbe", "livenessProbe"):
        for _ in range(found[kind].num_failures):
            seen.tell(found[kind], "refused")
    assert seen.problems == []


def whole(tokens: list[int]) -> Answer:
    """As it comes when nothing is wrong."""
    return Answer(token_ids=tokens, finish_reasons=["length"], usages=[len(tokens)])


def test_a_whole_answer_is_no_problem() -> None:
    assert whole([1, 2, 3]).problem(JOB, None) == ""
    assert whole([1, 2, 3]).problem(JOB, [1, 2, 3]) == ""


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Answer(error="APIError: gone", token_ids=[1]), "gone, after 1 of 3"),
        (Answer(token_ids=[1, 2, 3], usages=[3]), "finish reasons []"),
        (Answer(token_ids=[1, 2, 3], usages=[3], finish_reasons=["length"] * 2), "finish reasons"),
        (Answer(token_ids=[1, 2, 3], usages=[3], finish_reasons=["stop"]), "finish reasons"),
        (whole([1, 2]), "2 token ids came"),
        (Answer(token_ids=[1, 2, 3], usages=[], finish_reasons=["length"]), "counts []"),
        (whole([1, 5, 3]), "token 1 differs"),
    ],
)
def test_anything_else_is(answer: Answer, problem: str) -> None:
    assert problem in answer.problem(JOB, [1, 2, 3])


def test_pips_places_are_found_and_the_environment_wins() -> None:
    found = mirrors.parse(
        [
            ":env:.find-links='/wheels'",
            "global.find-links='/other'",
            "global.extra-index-url='file:///a/simple file:///b/simple'",
            "global.require-virtualenv='true'",
        ]
    )
    assert found == {
        "find-links": "/wheels",
        "extra-index-url": "file:///a/simple file:///b/simple",
    }
    assert mirrors.has_sources(found)
    assert not mirrors.has_sources({"cert": "/x.pem"})


def test_places_of_this_machine_are_mounted_and_never_baked_in(tmp_path: Path) -> None:
    wheels, scratch = tmp_path / "wheels", tmp_path / "scratch"
    wheels.mkdir()
    scratch.mkdir()
    (tmp_path / "index" / "simple").mkdir(parents=True)
    found = {
        "find-links": f"{wheels} https://example.org/",
        "extra-index-url": f"file:///missing file://{tmp_path}/index/simple",
    }
    flags = mirrors.flags(found, scratch)
    assert set(flags[::2]) == {"--volume"}
    assert flags[1::2] == [
        f"{scratch}:/root/.config/pip:ro",
        f"{tmp_path}/index:{tmp_path}/index:ro",
        f"{wheels}:{wheels}:ro",
    ]
    assert f"find-links = {wheels} https://example.org/" in (scratch / "pip.conf").read_text()
    assert mirrors.flags({}, scratch) == []


@pytest.mark.parametrize("optional", [False, True])
def test_without_podman_it_is_said_and_is_a_failure_unless_it_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], optional: bool
) -> None:
    monkeypatch.setattr(machine, "COMMANDS", ("no-such-podman",))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    status = k8s_run.main(["--stub", *(["--optional"] if optional else [])], {})
    assert status == (0 if optional else 1)
    printed = capsys.readouterr().out
    assert "not run: no-such-podman is not there" in printed
    assert "passed" not in printed


def test_only_root_can_reach_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(NotPossibleError, match="root"):
        machine.prepare(install=False, say=print, deadline=Deadline(60.0))


def test_a_failure_is_a_failure_even_where_podman_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(install: bool, say: object, deadline: object) -> None:
        raise RunError("a request failed")

    monkeypatch.setattr(machine, "prepare", fail)
    assert k8s_run.main(["--optional"], {}) == 1
    assert "a request failed" in capsys.readouterr().out


def test_a_configuration_is_written_only_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "SYSTEMD", tmp_path / "none")
    made = machine.environ({"PATH": "/bin"}, tmp_path)
    assert 'cgroup_manager = "cgroupfs"' in Path(made["CONTAINERS_CONF"]).read_text()
    assert machine.environ({"CONTAINERS_CONF": "/mine"}, tmp_path)["CONTAINERS_CONF"] == "/mine"
    monkeypatch.setattr(machine, "SYSTEMD", tmp_path)
    assert "CONTAINERS_CONF" not in machine.environ({}, tmp_path)


def test_of_a_group_of_failures_ours_is_told() -> None:
    ours = RunError("pod")
    nested = ExceptionGroup("a", [ExceptionGroup("b", [ValueError(), ours])])
    assert first(nested) is ours
    other = ExceptionGroup("a", [ValueError()])
    assert first(other) is other


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_secrets_are_those_of_the_script() -> None:
    made = secret_files.make("quire")
    assert made.secrets.keys() == {"redis-urls", "redis-acl", "quire-api-keys"}
    assert made.secrets["redis-urls"]["gateway"].startswith("redis://gateway:")
    assert len(made.api_key) == 64
    assert made.api_key not in json.dumps(made.secrets)


PODMAN = """#!/bin/sh
echo "$@" >> "$LOG"
case "$1 $2" in
"pod ls") printf 'run-1-redis-0\\nrun-10-redis-0\\nredis\\n' ;;
"volume ls") printf 'run-1-models\\nmodels\\n' ;;
"network ls") printf 'podman\\nrun-1-net\\n' ;;
"volume rm") echo "it is in use" >&2; exit 2 ;;
"pod rm") case $(grep -c "pod rm" "$LOG") in [12]) echo "resource busy" >&2; exit 125 ;; esac ;;
esac
"""


@pytest.fixture
def podman_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the podman above is asked; no pause is made between two tries."""
    (tmp_path / "podman").write_text(PODMAN)
    (tmp_path / "podman").chmod(0o755)
    path = f"{tmp_path}:/bin:/usr/bin"
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setattr("deploy.k8s_run.podman.REMOVAL_PAUSE_S", 0.0)
    return tmp_path / "log"


def asked(log: Path) -> list[str]:
    """podman's command lines."""
    return log.read_text().splitlines()


def test_only_what_the_run_made_is_removed(podman_log: Path) -> None:
    """What is busy is tried again, and what could not be removed is told."""
    left = Podman("run-1", os.environ).clean()
    assert left == ["run-1-models: it is in use"]
    removed = [line for line in asked(podman_log) if " rm " in line]
    assert removed == [
        *["pod rm --force --time 0 run-1-redis-0"] * 3,
        *["volume rm --force run-1-models"] * NUM_REMOVALS,
        "network rm --force run-1-net",
    ]


async def test_a_pod_that_is_busy_is_removed_at_last(podman_log: Path) -> None:
    await Podman("run-1", os.environ).remove("run-1-worker-1")
    assert asked(podman_log) == ["pod rm --force --ignore --time 0 run-1-worker-1"] * 3


async def test_a_pod_that_stays_busy_fails_the_run(
    podman_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.k8s_run.podman.NUM_REMOVALS", 2)
    with pytest.raises(PodmanError, match="resource busy"):
        await Podman("run-1", os.environ).remove("run-1-worker-1")


async def test_sigterm_leaves_the_container_that_holds_the_network(podman_log: Path) -> None:
    source = source_of(overlay("dev-cpu"))
    pod = pods.make(source, source.workload("worker"), 0)
    await Podman(source.prefix, os.environ).stop(pod)
    assert asked(podman_log) == [f"stop --time 35 {pod.name}-worker"]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"event": "draining", "live_rows": 0}\n{"event": "drained", "live_rows": 2}', False),
        ('    {"event": "drained", "live_rows": 0}\n    {"event": "worker ends"}', True),
        ('{"event": "draining", "live_rows": 0}', False),
        ("Traceback", False),
    ],
)
def test_a_worker_has_handed_over_if_it_left_with_nothing(text: str, verdict: bool) -> None:
    assert scenario.handed_over(text) is verdict


async def test_a_name_of_another_is_refused() -> None:
    with pytest.raises(AssertionError, match="not this run's"):
        await Podman("run-1", {}).kill("redis")
