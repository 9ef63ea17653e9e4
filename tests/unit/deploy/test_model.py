"""The model cache: whole or absent, whoever asks and whatever is killed."""

import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from deploy.local import model
from deploy.local.options import ROOT

PACKAGED = model.Packaged(
    name="tiny", package="tiny", version="1", sha256="ab" * 32, download_mb=1, recipe=1
)


def quiet(_: str) -> None:
    """No progress."""


def fill(_: model.Packaged, work: Path, say: model.Say) -> None:
    """Makes a model of two files."""
    say("making")
    (work / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (work / "model" / name).write_text("whole")


def leftovers(cache: Path) -> list[str]:
    """What stands in the cache beside the model and the lock."""
    return sorted(p.name for p in (cache / "models").glob("*") if "tmp" in p.name)


def test_the_model_is_made_once(tmp_path: Path) -> None:
    """The second time nothing is done."""
    said: list[str] = []
    first = model.ensure_packaged(PACKAGED, tmp_path, said.append, fill)
    second = model.ensure_packaged(PACKAGED, tmp_path, said.append, fill)
    assert first == second == tmp_path / "models" / PACKAGED.folder
    assert said == ["making"]
    assert (first / "config.json").read_text() == "whole"
    assert leftovers(tmp_path) == []


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """And the next one starts anew."""

    def fail(_: model.Packaged, work: Path, _say: model.Say) -> None:
        (work / "model").mkdir()
        (work / "model" / "config.json").write_text("half")
        raise model.ModelError("no more disk")

    with pytest.raises(model.ModelError):
        model.ensure_packaged(PACKAGED, tmp_path, quiet, fail)
    assert not (tmp_path / "models" / PACKAGED.folder).exists()
    assert leftovers(tmp_path) == []
    assert model.ensure_packaged(PACKAGED, tmp_path, quiet, fill).is_dir()


SCRIPT = """
import sys, time
from pathlib import Path
from tests.unit.deploy.test_model import PACKAGED, fill
from deploy.local import model

def slow(packaged, work, say):
    (work / "begun").touch()
    until = time.monotonic() + 60
    while not (Path(sys.argv[1]) / "go-on").exists() and time.monotonic() < until:
        time.sleep(0.01)
    fill(packaged, work, print)

print(model.ensure_packaged(PACKAGED, Path(sys.argv[1]), print, slow))
"""


def asker(cache: Path) -> "subprocess.Popen[str]":
    """A process that asks for the model, and makes it whole once `go-on` stands in the cache."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", SCRIPT, str(cache)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def until_begun(cache: Path) -> None:
    """Waits until a process is at work."""
    deadline = time.monotonic() + 40
    while not list(cache.glob("models/.tiny.tmp-*/begun")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_conversion_is_made_anew(tmp_path: Path) -> None:
    """What it left is removed."""
    first = asker(tmp_path)
    until_begun(tmp_path)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert leftovers(tmp_path)
    assert not (tmp_path / "models" / PACKAGED.folder).exists()
    folder = model.ensure_packaged(PACKAGED, tmp_path, quiet, fill)
    assert (folder / "config.json").read_text() == "whole"
    assert leftovers(tmp_path) == []


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    """The second waits and finds it."""
    first = asker(tmp_path)
    until_begun(tmp_path)
    second = asker(tmp_path)
    assert second.stdout is not None
    assert "waiting for it" in second.stdout.readline()
    (tmp_path / "go-on").touch()
    outputs = [process.communicate(timeout=40)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert "making\n" in outputs[0]
    assert "making\n" not in outputs[1]
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_another_file_or_another_recipe_is_another_folder() -> None:
    """An old conversion is not taken for a new one."""
    real = model.PACKAGED[model.SMOLLM2]
    assert real.folder == "smollm2-135m-0.1.2-bcc81830d10c-r1"


def test_a_wheel_without_exactly_one_gguf_is_refused(tmp_path: Path) -> None:
    """Not some other file by chance."""
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/one.gguf", b"1")
        archive.writestr("a/two.gguf", b"2")
    with pytest.raises(model.ModelError, match="2 GGUF files"):
        model.extract(wheel, tmp_path)


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    """No copy."""
    (tmp_path / "config.json").write_text("{}")
    assert model.ensure(str(tmp_path), tmp_path / "cache", quiet) == tmp_path
    assert not (tmp_path / "cache").exists()


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    """With all that MODEL may be."""
    with pytest.raises(model.ModelError, match="MODEL=smolm2-135m: neither smollm2-135m, nor"):
        model.ensure("smolm2-135m", tmp_path, quiet)


def test_names_in_the_api_are_short() -> None:
    """A folder's or a hub id's last part."""
    assert model.short_name("smollm2-135m") == "smollm2-135m"
    assert model.short_name("owner/some-model") == "some-model"
    assert model.short_name("/models/some-model/") == "some-model"
