"""Tools that are used where they are installed and named as skipped where they are not.

checkov drags in a hundred packages, which have no place in this environment; promtool is no Python
package. Both are found on the path or by a variable: CHECKOV, PROMTOOL.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from deploy.k8s_check.objects import Rendered

LIMIT_S = 300.0
ALERTS = Path(__file__).resolve().parent / "alerts.test.yaml"
EXCEPTIONS = Path(__file__).resolve().parent / "checkov.yaml"


def tool(name: str) -> str | None:
    """The command of a tool, or None."""
    return os.environ.get(name.upper()) or shutil.which(name)


def exceptions() -> dict[str, str]:
    """Checks of checkov that do not apply, each with the reason."""
    found = yaml.safe_load(EXCEPTIONS.read_text())
    return {str(name): str(reason) for name, reason in found.items()}


def checkov(command: str, renderings: Iterable[Rendered]) -> Iterator[str]:
    """What checkov finds beyond the exceptions; an exception that excuses nothing is one too."""
    with tempfile.TemporaryDirectory() as scratch:
        for rendered in renderings:
            path = Path(scratch) / (rendered.name.replace("/", "_") + ".yaml")
            path.write_text(yaml.safe_dump_all(rendered.manifests, sort_keys=False))
        done = subprocess.run(
            [command, "--directory", scratch, "--framework", "kubernetes", "--output", "json",
             "--compact", "--quiet", "--skip-download"],
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    try:
        report = json.loads(done.stdout)
    except ValueError:
        yield f"checkov gave no report: {done.stderr.strip()[-500:]}"
        return
    failed = report["results"]["failed_checks"]
    excused = exceptions()
    for entry in failed:
        if entry["check_id"] not in excused:
            yield f"{entry['check_id']} {entry['check_name']}: {entry['resource']}"
    for name in sorted(set(excused) - {entry["check_id"] for entry in failed}):
        yield f"{name} is excused in checkov.yaml and never found"


def promtool(command: str, renderings: Iterable[Rendered]) -> Iterator[str]:
    """What promtool says of the alert rules, and whether they fire when alerts.test.yaml says."""
    for rendered in renderings:
        for rules in rendered.of("PrometheusRule"):
            with tempfile.TemporaryDirectory() as scratch:
                (Path(scratch) / "rules.yaml").write_text(yaml.safe_dump(rules["spec"]))
                shutil.copy(ALERTS, scratch)
                for arguments in (("check", "rules", "rules.yaml"), ("test", "rules", ALERTS.name)):
                    done = subprocess.run(
                        [command, *arguments],
                        cwd=scratch, capture_output=True, text=True, timeout=LIMIT_S, check=False,
                    )  # fmt: skip
                    if done.returncode != 0:
                        yield f"{rendered.name}: {(done.stdout + done.stderr).strip()}"
