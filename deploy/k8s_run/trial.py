"""Whether this machine can run a pod with limits and names: one is played, and removed again.

It is what the run's own pods need, as small as it can be: this machine's /usr, read-only, in an
image that is otherwise empty, so that neither a registry nor a build is asked before.
"""

import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import yaml

from deploy.k8s_check.objects import Manifest
from deploy.k8s_run import honoured
from deploy.k8s_run.errors import RunError
from deploy.k8s_run.podman import Podman

IMAGE = "localhost/quire-standin/trial:latest"
CONTAINER = "lookup"
WAIT_S = 60.0
ROOT = Path("/")
# Where the parts of a system stand, or from where they point below /usr.
FOLDERS = ("usr", "bin", "sbin", "lib", "lib64")
EMPTY = ("etc", "proc", "sys", "dev", "run", "tmp")


async def run(podman: Podman) -> None:
    """Plays it on the run's network. Raises RunError where that does not work."""
    name = f"{podman.prefix}-trial"
    container = f"{name}-{CONTAINER}"
    await _make_image(podman)
    made = manifest(name)
    await podman.command(
        "kube", "play", "--quiet", "--network", f"{podman.network}:alias={name}", "-",
        stdin=yaml.safe_dump(made).encode(),
    )  # fmt: skip
    await podman.command("wait", container, timeout_s=WAIT_S)
    state = await podman.state(container)
    if state.exit_code != 0:
        lines = await podman.last_lines(container)
        raise RunError(f"its own name is not found, status {state.exit_code}:\n{lines}")
    problems = list(honoured.broken(made, CONTAINER, await podman.inspect(container)))
    if problems:
        raise RunError(f"a container is not as it was asked for: {'; '.join(problems)}")
    await podman.remove(name)


def manifest(name: str) -> Manifest:
    """A pod that looks its own name up, and ends. Raises RunError without getent."""
    command = shutil.which("getent")
    if command is None:
        raise RunError("getent, which looks names up, is not there")
    mounts = [folder for folder in FOLDERS if _is_folder(folder)]
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": [command, "ahostsv4", name],
        "resources": {"limits": {"memory": "64Mi", "cpu": "500m"}},
        "securityContext": {
            "runAsUser": 65534,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": folder, "mountPath": f"/{folder}", "readOnly": True} for folder in mounts
        ],
    }
    volumes = [
        {"name": folder, "hostPath": {"path": str(ROOT / folder), "type": "Directory"}}
        for folder in mounts
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [container], "volumes": volumes},
    }


def _is_folder(name: str) -> bool:
    return (ROOT / name).is_dir() and not (ROOT / name).is_symlink()


async def _make_image(podman: Podman) -> None:
    """Empty folders, and links as this machine has them."""
    code, _, _ = await podman.attempt("image", "exists", IMAGE)
    if code == 0:
        return
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch) / "root.tar"
        with tarfile.open(archive, "w") as root:
            for name in (*FOLDERS, *EMPTY):
                entry = tarfile.TarInfo(name)
                entry.mode = 0o755
                if (ROOT / name).is_symlink():
                    entry.type, entry.linkname = tarfile.SYMTYPE, str((ROOT / name).readlink())
                else:
                    entry.type = tarfile.DIRTYPE
                root.addfile(entry)
        await podman.command("import", str(archive), IMAGE)
