"""How the native kernels are compiled, found and chosen."""

import subprocess
import sys
from pathlib import Path

import pytest

from kernels.native import build, library
from kernels.native.build import CantBuildError
from tests.kernels.native import needs_native


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment's folder in which nothing was compiled."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return tmp_path


def test_what_is_not_compiled_says_what_to_do(elsewhere: Path) -> None:
    with pytest.raises(CantBuildError, match="not compiled: run  make setup"):
        build.built()


def test_no_compiler_is_a_reason_and_no_failure(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    assert build.main() == 0
    assert "no native kernels, the worker runs on plain torch" in capsys.readouterr().out


def test_a_failed_build_leaves_nothing(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILER", "false")
    with pytest.raises(CantBuildError, match="false failed"):
        build.build(lambda text: None)
    assert list((elsewhere / "quire-native").iterdir()) == []


def test_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(CantBuildError, match="are for Linux on x86-64, this is Linux on aarch64"):
        build.built()


def test_changed_sources_have_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = build.find_torch()
    before = build.folder_of(torch)
    for path in build.sources():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.folder_of(torch) == before
    (tmp_path / "lanes.h").write_text("// changed\n")
    assert build.folder_of(torch) != before


def test_the_best_instruction_set_is_chosen() -> None:
    wide = {"avx2", "fma", "avx512f", "avx512vl", "avx512bw", "avx512dq"}
    assert library.usable({"avx2"}) == []
    assert library.usable({"avx2", "fma", "avx512f"}) == ["avx2"]
    assert library.usable(wide) == ["avx2", "avx512"]
    assert library.usable(wide | {"avx512_bf16"})[-1] == "avx512bf16"
    assert list(library.NEEDS) == list(build.INSTRUCTION_SETS)


@needs_native
def test_torchs_openmp_is_the_only_one() -> None:
    library.load()
    lines = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {line.split()[-1] for line in lines if "libgomp" in line or "libiomp" in line}
    assert runtimes == {str(build.find_torch().openmp.resolve())}


@needs_native
def test_a_forked_child_computes_on() -> None:
    """Its parent's helpers are not there; it starts its own."""
    program = (
        "import os, torch; torch.set_num_threads(3);"
        "from kernels.native.linear import PackedLinear;"
        "linear, x = PackedLinear(torch.ones(640, 64)), torch.ones(9, 64);"
        "assert linear(x).sum() == 9 * 640 * 64;"
        "pid = os.fork();"
        "good = bool(linear(x).sum() == 9 * 640 * 64);"
        "os._exit(not good) if pid == 0 else None;"
        "assert os.waitpid(pid, 0)[1] == 0"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=25, cwd=build.SOURCES)


@needs_native
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_no_library_holds_instructions_of_a_better_one() -> None:
    """The flags of a set reach the sources of that set only."""
    folder = build.built()
    wide, pairs = {}, {}
    for name in build.INSTRUCTION_SETS:
        listing = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", str(build.library_file(folder, name))],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        wide[name], pairs[name] = "%zmm" in listing, "vdpbf16ps" in listing
        assert "%ymm" in listing
    assert wide == {"avx2": False, "avx512": True, "avx512bf16": True}
    assert pairs == {"avx2": False, "avx512": False, "avx512bf16": True}


@needs_native
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_build_from_nothing(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "INSTRUCTION_SETS", {"avx2": build.INSTRUCTION_SETS["avx2"]})
    said: list[str] = []
    folder = build.build(said.append)
    assert [path.name for path in (elsewhere / "quire-native").iterdir()] == [folder.name]
    assert [path.name for path in folder.iterdir()] == ["libquire-avx2.so"]
    assert len(said) == 2
    assert build.build(said.append) == folder
    assert len(said) == 2
