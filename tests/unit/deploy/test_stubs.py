"""The committed stubs and the baseline image are what the protos give."""

import os
import subprocess
import sys
from pathlib import Path

from deploy.local.options import ROOT

GENERATED = ROOT / "protos" / "gen"
BIN = Path(sys.executable).parent


def test_stubs_are_fresh(tmp_path: Path) -> None:
    """`make proto` would change nothing."""
    protos = sorted(str(path) for path in (ROOT / "protos" / "quire").rglob("*.proto"))
    plugins = [
        f"--plugin={name}={BIN / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]
    outputs = [
        f"--python_out={tmp_path}",
        f"--grpc_python_out={tmp_path}",
        f"--mypy_out=quiet:{tmp_path}",
        f"--mypy_grpc_out=quiet:{tmp_path}",
    ]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}"]
    subprocess.run([*command, *plugins, *outputs, *protos], check=True, cwd=ROOT)
    fresh = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*")}
    kept = {
        path.relative_to(GENERATED): path.read_text()
        for pattern in ("*_pb2*.py", "*_pb2*.pyi")
        for path in GENERATED.rglob(pattern)
    }
    assert sorted(fresh) == sorted(kept)
    stale = [str(name) for name, text in fresh.items() if kept[name] != text]
    assert not stale, f"run `make proto`: {stale}"


def test_protos_are_compatible_with_the_baseline() -> None:
    """A change that breaks a neighbour needs a new baseline, knowingly."""
    environ = {**os.environ, "HOME": os.environ.get("HOME", "/tmp")}
    for arguments in (["lint"], ["breaking", "--against", "baseline.binpb"]):
        result = subprocess.run(
            [str(BIN / "buf"), *arguments],
            cwd=ROOT / "protos",
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
