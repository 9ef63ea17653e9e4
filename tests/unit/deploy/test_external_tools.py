"""checkov, hadolint and promtool are run where they are, and named where they are not."""

import json
import sys
from pathlib import Path

import pytest

from deploy.k8s_check import external
from tests.unit.deploy.manifests import overlay

EXCUSED = sorted(external.exceptions())


def command(folder: Path, name: str, body: str) -> None:
    """A program that stands for a tool and notes how it was called."""
    path = folder / name
    path.write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\n"
        f"log = pathlib.Path({str(folder / 'calls')!r})\n"
        f"log.open('a').write(' '.join([{name!r}, *sys.argv[1:]]) + '\\n')\n{body}\n"
    )
    path.chmod(0o755)


def checkov_says(*checks: str) -> str:
    """A report with these failures."""
    failed = [{"check_id": c, "check_name": "Name", "resource": "Pod.x"} for c in checks]
    return f"print(json.dumps({json.dumps([{'results': {'failed_checks': failed}}])}))"


def run(folder: Path) -> tuple[list[str], list[str]]:
    return external.run_all([overlay("prod")], {"PATH": str(folder)})


def test_what_is_not_installed_is_named(tmp_path: Path) -> None:
    assert run(tmp_path) == ([], ["checkov", "hadolint", "promtool"])
    assert set(external.HOW_TO_GET) == set(external.TOOLS)


def test_what_is_installed_is_run_on_the_renderings(tmp_path: Path) -> None:
    command(tmp_path, "checkov", checkov_says(*EXCUSED))
    command(tmp_path, "promtool", "assert pathlib.Path('rules.yaml').is_file()")
    command(tmp_path, "hadolint", "")
    assert run(tmp_path) == ([], [])
    calls = (tmp_path / "calls").read_text()
    assert "checkov --directory" in calls
    assert "worker.Dockerfile" in calls
    assert "promtool check rules rules.yaml" in calls
    assert "promtool test rules alerts.test.yaml" in calls


@pytest.mark.parametrize(
    ("name", "body", "problem"),
    [
        ("checkov", checkov_says(*EXCUSED, "CKV_K8S_1"), "checkov: CKV_K8S_1 Name: Pod.x"),
        ("checkov", checkov_says(*EXCUSED[1:]), f"{EXCUSED[0]} is excused in checkov.yaml and"),
        ("checkov", "print('oops')", "checkov gave no report"),
        ("hadolint", "print('worker.Dockerfile:3 DL1')", "hadolint: worker.Dockerfile:3 DL1"),
        ("promtool", "sys.exit('1:2: parse error')", "promtool: overlays/prod: 1:2: parse error"),
    ],
)
def test_what_a_tool_finds_is_told(tmp_path: Path, name: str, body: str, problem: str) -> None:
    command(tmp_path, name, body)
    found, _ = run(tmp_path)
    assert found
    assert problem in found[0]


def test_a_variable_goes_before_the_path(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "PROMTOOL": "/opt/promtool"}
    assert external.tool("promtool", environ) == "/opt/promtool"
