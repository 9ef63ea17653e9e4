"""Compiles the native kernels, once per set of sources, flags and torch.

`python -m kernels.native.build` is a step of `make setup`; a serving process never compiles. The
result stands under the environment's own folder (sys.prefix), in a folder named by what it was made
from; it is renamed into place when all of it is there, so that a killed or a second build leaves
nothing half done.

One library per instruction set, all with torch's own OpenMP runtime, which knows how many threads
torch was given. Standard library only, and torch is not imported: its version and its place are
read from the environment.
"""

import hashlib
import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILER = "g++"
LIMIT_S = 300.0

# Instruction set -> flags of the compiler. library.load chooses by what the machine has.
_WIDE = ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq")
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx2", "-mfma", *_WIDE, "-mprefer-vector-width=512"),
    "avx512bf16": ("-mavx2", "-mfma", *_WIDE, "-mavx512bf16", "-mprefer-vector-width=512"),
}
# Fused operations are written out; others would change sums between compilers.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno"),
)


class CantBuildError(Exception):
    """Why there will be no native kernels here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """What the libraries are linked to."""

    version: str
    openmp: Path


def find_torch() -> Torch:
    """Of this environment, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise CantBuildError("torch is not installed")
    folder = Path(spec.submodule_search_locations[0])
    found = [*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")]
    if not found:
        raise CantBuildError(f"{folder} brings no libgomp, so threads can't be shared with torch")
    return Torch(version=importlib.metadata.version("torch"), openmp=min(found))


def sources() -> list[Path]:
    """All that is compiled or included."""
    return sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")))


def folder_of(torch: Torch) -> Path:
    """Where the libraries stand, or will stand."""
    digest = hashlib.sha256(f"{torch.version} {FLAGS} {INSTRUCTION_SETS}".encode())
    for path in sources():
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return Path(sys.prefix) / "quire-native" / digest.hexdigest()[:16]


def library_file(folder: Path, instruction_set: str) -> Path:
    """Of one instruction set."""
    return folder / f"libquire-{instruction_set}.so"


def built() -> Path:
    """The finished folder for the sources as they are; raises CantBuildError with the reason."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise CantBuildError(
            f"native kernels are for Linux on x86-64, this is {platform.system()} on "
            f"{platform.machine()}"
        )
    folder = folder_of(find_torch())
    if not folder.is_dir():
        raise CantBuildError("the native kernels are not compiled: run  make setup")
    return folder


def build(say: Callable[[str], None]) -> Path:
    """Compiles unless that is done; returns the folder. Raises CantBuildError."""
    try:
        return built()
    except CantBuildError as error:
        if "make setup" not in str(error):
            raise
    if shutil.which(COMPILER) is None:
        raise CantBuildError(f"no C++ compiler: {COMPILER} is not on the path")
    torch = find_torch()
    target = folder_of(torch)
    began = time.monotonic()
    say(f"compiling the native kernels for {', '.join(INSTRUCTION_SETS)} (once; about 30 s)")
    try:
        target.parent.mkdir(exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise CantBuildError(f"{target.parent} can't be written: {error}") from error
    try:
        scratch.chmod(0o755)
        _compile_all(scratch, torch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():  # else another build was first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"native kernels done in {time.monotonic() - began:.0f} s")
    return target


def _compile_all(scratch: Path, torch: Torch) -> None:
    """Objects of all sources and sets, two at a time; then the libraries."""
    units = [path for path in sources() if path.suffix == ".cpp"]
    jobs = []
    objects: dict[str, list[str]] = {}
    for name, flags in INSTRUCTION_SETS.items():
        for unit in units:
            made = scratch / f"{unit.stem}-{name}.o"
            objects.setdefault(name, []).append(str(made))
            jobs.append([COMPILER, *FLAGS, *flags, "-c", str(unit), "-o", str(made)])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_run, jobs))
    for name, parts in objects.items():
        library = str(library_file(scratch, name))
        # Without -fopenmp, which would name the system's runtime instead of torch's.
        _run([COMPILER, "-shared", *parts, str(torch.openmp), "-lpthread", "-o", library])
        for part in parts:
            Path(part).unlink()


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=SOURCES
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CantBuildError(f"{COMPILER} did not run: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise CantBuildError(f"{COMPILER} failed: {lines[0]}")


def main() -> int:
    """Says what was done, or why not and what that means; never fails the set-up."""

    def say(text: str) -> None:
        print(f"[setup] {text}", flush=True)

    try:
        build(say)
    except CantBuildError as error:
        say(f"no native kernels, the worker runs on plain torch, many times slower: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
