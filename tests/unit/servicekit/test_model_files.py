"""Finding a model's folder, naming its contents."""

from pathlib import Path

import pytest

from servicekit import model_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the least that counts as a model."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    return tmp_path


def test_a_folder_with_a_config_is_a_model(folder: Path) -> None:
    """As an absolute path, whatever was given."""
    assert model_files.model_dir(str(folder), weights=True) == folder.resolve()


@pytest.mark.parametrize("model", ["/no/such/folder", "no-such-name", "a/b/c"])
def test_what_is_neither_folder_nor_hub_id_is_named(model: str) -> None:
    """Without asking the hub."""
    with pytest.raises(FileNotFoundError, match="QUIRE_MODEL"):
        model_files.model_dir(model, weights=False)


def test_the_digest_covers_what_decides_the_meaning_of_token_ids(folder: Path) -> None:
    """Weights do not count; the tokenizer, the template and the settings do."""
    first = model_files.model_digest(folder)
    (folder / "model.safetensors").write_text("weights")
    assert model_files.model_digest(folder) == first
    seen = {first}
    for name in model_files.TEXT_FILES:
        (folder / name).write_text("changed")
        seen.add(model_files.model_digest(folder))
    assert len(seen) == 1 + len(model_files.TEXT_FILES)


def test_the_digest_does_not_confuse_files(folder: Path) -> None:
    """Moving a byte from one file to the next is a change."""
    (folder / "config.json").write_text("ab")
    (folder / "generation_config.json").write_text("c")
    first = model_files.model_digest(folder)
    (folder / "config.json").write_text("a")
    (folder / "generation_config.json").write_text("bc")
    assert model_files.model_digest(folder) != first


def test_the_served_name_is_the_configured_one_or_the_folder_s() -> None:
    """Also for a hub id."""
    assert model_files.served_name("", "/models/some-model") == "some-model"
    assert model_files.served_name("", "owner/some-model") == "some-model"
    assert model_files.served_name("mine", "/models/some-model") == "mine"
