"""The Job that fills the volume of models: nobody sees a folder that is not whole and verified."""

import hashlib
import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "deploy" / "k8s" / "components" / "model-cache" / "fill.py"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"[]"}


class Hub:
    """A hub with one model; what it sends may be damaged on the way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.damaged: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def model_info(self, model_id: str, **options: Any) -> Any:
        """Sums of large files only, and a README that is not wanted."""
        self.asked.append((model_id, options["revision"]))
        sums = {"model.safetensors": b"weights", "pytorch_model.bin": b"pickle"}
        siblings = [SimpleNamespace(rfilename="config.json", lfs=None)]
        for name, data in sums.items():
            digest = hashlib.sha256(data).hexdigest()
            siblings.append(SimpleNamespace(rfilename=name, lfs=SimpleNamespace(sha256=digest)))
        return SimpleNamespace(sha="0" * 40, siblings=siblings)

    def download(self, model_id: str, *, revision: str, local_dir: Path, **_: Any) -> None:
        """The files, into the folder."""
        self.asked.append((model_id, revision))
        local_dir.mkdir(exist_ok=True)
        for name, data in FILES.items():
            (local_dir / name).write_bytes(b"?" if name in self.damaged else data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(monkeypatch)


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fill", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_whole_folder_appears_at_once(hub: Hub, script: ModuleType, tmp_path: Path) -> None:
    """The very commit that the sums are of is fetched, not whatever `main` is by then."""
    script.fill("some/model", "main", tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == set(FILES)
    assert hub.asked == [("some/model", "main"), ("some/model", "0" * 40)]


def test_a_damaged_file_is_fetched_again(hub: Hub, script: ModuleType, tmp_path: Path) -> None:
    hub.damaged = {"model.safetensors"}
    with pytest.raises(SystemExit, match=r"model\.safetensors"):
        script.fill("some/model", "main", tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / ".model.partial" / "model.safetensors").exists()
    hub.damaged = set()
    script.fill("some/model", "main", tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == b"weights"


def test_a_folder_that_is_there_is_left_alone(hub: Hub, script: ModuleType, tmp_path: Path) -> None:
    """Pods read it."""
    (tmp_path / "config.json").write_text("{}")
    script.fill("some/model", "main", tmp_path)
    assert hub.asked == []
