"""schemathesis over the OpenAPI document: valid and invalid requests to every route."""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from checks import API_KEY, BASE_URL, HAS_KEYS, WORK, check, main

HERE = Path(__file__).resolve().parent
EXAMPLES = int(os.environ["CLIENTS_EXAMPLES"])
SEED = 20260101
# A schema can't say everything: of what it allows some must be refused, such as two prompts at
# once where one is needed, so what was refused is no failure.
LEFT_OUT = "positive_data_acceptance"
REQUEST_S = 120


@cache
def report() -> tuple[int, str, Path]:
    """Exit status, output and events of the one run."""
    folder = Path(WORK) / "report"
    headers = ["-H", f"Authorization: Bearer {API_KEY}"] if HAS_KEYS else []
    command = [
        str(Path(sys.executable).parent / "schemathesis"), "run", f"{BASE_URL}/openapi.json",
        "--max-examples", str(EXAMPLES), "--phases", "examples,coverage,fuzzing", "--mode", "all",
        "--exclude-checks", LEFT_OUT, "--continue-on-failure", "--seed", str(SEED),
        "--suppress-health-check", "all", "--request-timeout", str(REQUEST_S),
        "--generation-database", "none", "--report", "ndjson", "--report-dir", str(folder),
        "--no-color", *headers,
    ]  # fmt: skip
    environ = {**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        command, cwd=WORK, env=environ, capture_output=True, text=True, timeout=5400, check=False
    )
    (events,) = folder.glob("*.ndjson")
    return done.returncode, done.stdout + done.stderr, events


def scenarios() -> list[dict[str, Any]]:
    """Those that ran: one for each route and phase."""
    found = []
    with report()[2].open() as lines:
        for line in lines:
            event = json.loads(line).get("ScenarioFinished")
            if event is not None and event["status"] != "skip":
                found.append(event)
    return found


@check
def no_failures() -> None:
    """No server error, and every answer is as the document says."""
    status, output, _ = report()
    assert status == 0, output[-8000:]


@check
def examples() -> None:
    """Every route with something to vary has had its examples."""
    numbers: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    for scenario in scenarios():
        recorder = scenario["recorder"]
        numbers[recorder["label"]] += len(recorder.get("cases", {}))
        for interaction in recorder.get("interactions", {}).values():
            response = interaction.get("response") or {}
            statuses[str(response.get("status_code", "none"))] += 1
    for label, number in sorted(numbers.items()):
        print(f"  {number:5} {label}")
    print("  statuses:", ", ".join(f"{status} {n}" for status, n in sorted(statuses.items())))
    posts = [number for label, number in numbers.items() if label.startswith("POST")]
    assert len(posts) >= 9, numbers
    assert min(posts) >= EXAMPLES, numbers
    assert not [status for status in statuses if status.startswith("5")], statuses


if __name__ == "__main__":
    sys.exit(main())
