"""The Secrets of a run: deploy/k8s/secrets.sh makes them, for a cluster that is not there.

The script's kubectl is one that finds nothing and writes down what it is to create.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from deploy.k8s_check import render
from deploy.k8s_run.errors import NotPossibleError, RunError
from deploy.k8s_run.pods import Secrets

SCRIPT = render.K8S / "secrets.sh"
LIMIT_S = 60.0
_KUBECTL = """#!/bin/sh
set -eu
if [ "$3 $4" = "get secret" ]; then exit 1; fi
if [ "$3 $4 $5" != "create secret generic" ]; then exit 9; fi
exec "$REAL_KUBECTL" "$@" --dry-run=client --output=json > "$STORE/$6.json"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Contents by Secret and key, and the API key that the script prints."""

    secrets: Secrets
    api_key: str


def make(namespace: str) -> Made:
    """Runs the script. Raises RunError with its message."""
    if shutil.which("openssl") is None:
        raise NotPossibleError("deploy/k8s/secrets.sh needs openssl, which is not there")
    with tempfile.TemporaryDirectory() as scratch:
        tools, store = Path(scratch) / "bin", Path(scratch) / "store"
        tools.mkdir()
        store.mkdir(mode=0o700)
        (tools / "kubectl").write_text(_KUBECTL)
        (tools / "kubectl").chmod(0o755)
        done = subprocess.run(
            ["sh", str(SCRIPT), namespace],
            env={
                "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
                "HOME": scratch,
                "REAL_KUBECTL": str(render.kubectl()),
                "STORE": str(store),
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode != 0:
            raise RunError(f"deploy/k8s/secrets.sh: {done.stderr.strip()}")
        return Made(secrets=_read(store), api_key=_api_key(done.stdout))


def _read(store: Path) -> dict[str, dict[str, str]]:
    found = {}
    for path in sorted(store.glob("*.json")):
        document = json.loads(path.read_text())
        found[str(document["metadata"]["name"])] = {
            key: base64.b64decode(value).decode() for key, value in document["data"].items()
        }
    return found


def _api_key(output: str) -> str:
    found = re.search(r"shown this once: (\S+)$", output, re.MULTILINE)
    if found is None:
        raise RunError("deploy/k8s/secrets.sh printed no API key")
    return found[1]
