"""Makes .venv with the locked packages; a second run sees the stamp and returns at once.

Runs on the system Python: standard library only. The stamp is written last, so that a killed set-up
is made anew. An environment that this script did not make is never touched. The native kernels have
a stamp of their own: changed sources are compiled without making the environment anew.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.local import preflight, procs

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
MARK = "quire-setup.json"
RUNTIME, TOOLS, CUDA = "requirements.lock", "requirements-dev.lock", "requirements-cuda.lock"
TORCH = "torch"
TICK_S = 10.0
CPU_SIZES = "about 0.6 GB of packages to download, 2.3 GB on disk"
CUDA_SIZES = "about 2.7 GB more to download for CUDA, 6 GB more on disk"
CPU_DISK_GIB, CUDA_DISK_GIB, MODEL_DISK_GIB = 3.0, 9.0, 1.0
IMPORTED = (
    "torch",
    "triton",
    "transformers.models.llama.modeling_llama",
    "gpu_worker.runner",
    "gateway.app",
    "scheduler_svc.app",
)
_CUDA_NAME = re.compile(r"^(nvidia|cuda)[-_]", re.IGNORECASE)


class SetupError(Exception):
    """The set-up cannot go on; the message says why and what to do."""


def lock_lines(name: str) -> dict[str, str]:
    """Package name to exact version of one lock file."""
    lines = (line.strip() for line in (ROOT / name).read_text().splitlines())
    pairs = (line.split("==", 1) for line in lines if line and not line.startswith("#"))
    return {package: version for package, version in pairs}


def is_cuda_build(requires: list[str]) -> bool:
    """Whether torch's own metadata asks for CUDA packages (those of extras do not count)."""
    return any(_CUDA_NAME.match(item) and "extra ==" not in item for item in requires)


def index_options(index: str) -> list[str]:
    """pip's options for TORCH_INDEX, an address or a folder with wheels."""
    if not index:
        return []
    if Path(index).expanduser().is_dir():
        return ["--no-index", "--find-links", str(Path(index).expanduser().resolve())]
    return ["--index-url", index]


def wanted_stamp(torch_index: str) -> dict[str, Any]:
    """What a finished environment records about itself."""
    locks = [ROOT / name for name in (RUNTIME, TOOLS, CUDA)]
    return {
        "locks": hashlib.sha256(b"\0".join(path.read_bytes() for path in locks)).hexdigest(),
        "root": str(ROOT),
        "torch_index": torch_index,
    }


def is_finished(torch_index: str) -> bool:
    """Whether .venv was made to the end from these locks. No TORCH_INDEX accepts any build."""
    try:
        stamp = json.loads((VENV / MARK).read_text())
    except (OSError, ValueError):
        return False
    wanted = wanted_stamp(torch_index or stamp.get("torch_index", ""))
    return {key: stamp.get(key) for key in wanted} == wanted and PYTHON.exists()


def say(text: str) -> None:
    """One line of progress, at once."""
    print(f"[setup] {text}", flush=True)


def pip(*arguments: str, quiet: bool = False) -> None:
    """Runs the environment's pip; its own output and a line now and then are the progress."""
    command = [str(PYTHON), "-m", "pip", *arguments, *(["--quiet"] if quiet else [])]
    started = time.monotonic()
    # A pip that outlived this process would write into the environment of the next set-up.
    hook = procs.death_with_parent()
    process = subprocess.Popen(command, cwd=ROOT, preexec_fn=hook)  # noqa: PLW1509 - no threads
    try:
        while True:
            try:
                status = process.wait(TICK_S)
                break
            except subprocess.TimeoutExpired:
                say(f"pip is at work ... {time.monotonic() - started:.0f} s")
    except BaseException:
        process.kill()
        raise
    if status != 0:
        raise SetupError(
            "pip failed: its message stands above. Nothing is lost: run the same command again"
        )


def make_environment() -> None:
    """A fresh .venv, marked as ours before anything is put into it."""
    if VENV.exists() or VENV.is_symlink():
        if VENV.is_symlink() or not (VENV / MARK).exists():
            raise SetupError(".venv was not made by Quire's set-up; move it:  mv .venv .venv.old")
        say("removing the unfinished or outdated .venv")
        shutil.rmtree(VENV)
    VENV.mkdir()
    (VENV / MARK).write_text("{}\n")
    say(f"making .venv with Python {sys.version.split()[0]}")
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)


def choose_torch(version: str, torch_index: str) -> bool:
    """Asks pip which build of torch it would take here; whether that is the CUDA build."""
    say(f"asking pip which build of torch {version} it takes here")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip(
            "install", "--dry-run", "--ignore-installed", "--no-deps", "--report", str(report),
            *index_options(torch_index), f"{TORCH}=={version}", quiet=True,
        )  # fmt: skip
        found = json.loads(report.read_text())["install"][0]["metadata"]
    cuda = is_cuda_build(found.get("requires_dist", []))
    say(f"torch {found['version']}, a {'CUDA' if cuda else 'CPU'} build; {CPU_SIZES}")
    if cuda:
        say(f"this build does not import without CUDA's libraries: {CUDA_SIZES}")
        if not shutil.which("nvidia-smi"):
            say("no GPU seen here: TORCH_INDEX=<index or folder with a CPU build> avoids that")
        missing = preflight.disk(ROOT, CUDA_DISK_GIB, "the environment with CUDA")
        if preflight.report([missing]):
            raise SetupError("not enough room for the CUDA build")
    return cuda


def write_paths() -> None:
    """Lets the environment's Python find the services and the stubs from any folder."""
    site = subprocess.run(
        [str(PYTHON), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    (Path(site) / "quire.pth").write_text(f"{ROOT}\n{ROOT / 'protos' / 'gen'}\n")


def install(torch_index: str) -> None:
    """Everything from the locks and nothing else; then torch must import."""
    started = time.monotonic()
    make_environment()
    version = lock_lines(RUNTIME)[TORCH]
    cuda = choose_torch(version, torch_index)
    say("installing torch (step 1 of 3)")
    # Without compiling: most of it is never imported, and what is compiles when that is checked.
    quick = ("install", "--no-deps", "--no-compile")
    pip(*quick, *index_options(torch_index), f"{TORCH}=={version}")
    say("installing the other packages (step 2 of 3)")
    locks = [RUNTIME, TOOLS, *([CUDA] if cuda else [])]
    pip(*quick, *(part for name in locks for part in ("-r", name)))
    say("checking that torch and the services import (step 3 of 3)")
    write_paths()
    check_imports()
    unfinished = VENV / (MARK + ".new")
    unfinished.write_text(json.dumps(wanted_stamp(torch_index), indent=1) + "\n")
    unfinished.replace(VENV / MARK)
    say(f"done in {time.monotonic() - started:.0f} s")


def check_imports() -> None:
    """What serving imports, whose bytecode is kept whatever the caller's environment says of it.

    Without it each start compiles torch and transformers anew, for seconds. Raises SetupError.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [str(PYTHON), "-c", f"import {', '.join(IMPORTED)}"]
    if subprocess.run(command, check=False, cwd=ROOT, env=kept).returncode != 0:
        raise SetupError("torch or a service does not import; the message stands above")


def build_native() -> None:
    """Compiles the native kernels unless that is done; without a compiler Quire runs without."""
    subprocess.run([str(PYTHON), "-m", "kernels.native.build"], check=True, cwd=ROOT)


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """One set-up of this clone at a time; a second one waits and then finds the work done."""
    folder = ROOT / "run"
    folder.mkdir(exist_ok=True)
    with (folder / "setup.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this clone is running; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def check_machine(serve: bool, fresh: bool) -> int:
    """The number of things that are missing; each is printed."""
    found: list[preflight.Missing | None] = [preflight.system(), preflight.make()]
    if fresh:
        found += [
            preflight.venv(),
            preflight.writable(ROOT, "the clone"),
            preflight.disk(ROOT, CPU_DISK_GIB, "the environment"),
        ]
    if serve:
        from deploy.local import options
        from servicekit.settings import SettingsError

        try:
            chosen = options.read(os.environ)
        except SettingsError as error:
            raise SetupError(str(error)) from error
        found.append(preflight.port(chosen.host, chosen.port, "PORT"))
        found.append(preflight.port(chosen.host, chosen.grpc_port, "GRPC_PORT"))
        if not (chosen.cache_dir / "models").exists():
            found.append(preflight.writable(chosen.cache_dir, "the model cache"))
            found.append(preflight.disk(chosen.cache_dir, MODEL_DISK_GIB, "the model cache"))
    return preflight.report(found)


def main() -> int:
    """`--then MODULE` goes on as that module, in the environment and under the same process id."""
    parser = argparse.ArgumentParser(prog="python3 -m deploy.local.setup", description=__doc__)
    parser.add_argument("--then", metavar="MODULE", default="", help="module to run afterwards")
    arguments = parser.parse_args()
    too_old = preflight.python()
    if too_old is not None:
        newer = preflight.newer_python()
        if newer is None:
            return preflight.report([too_old])
        os.execv(newer, [newer, "-m", "deploy.local.setup", *sys.argv[1:]])
    index = os.environ.get("TORCH_INDEX", "").strip()
    try:
        fresh = not is_finished(index)
        serve = arguments.then == "deploy.local.launcher"
        if check_machine(serve, fresh):
            return 1
        if fresh:
            with only_one():
                if not is_finished(index):
                    install(index)
        build_native()
    except (SetupError, OSError, subprocess.CalledProcessError) as error:
        print(f"[setup] {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\n[setup] stopped; run the same command again to go on", file=sys.stderr)
        return 130
    if arguments.then:
        os.execv(str(PYTHON), [str(PYTHON), "-m", arguments.then])
    return 0


if __name__ == "__main__":
    sys.exit(main())
