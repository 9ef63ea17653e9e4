"""What a model's folder says: its tokenizer, its ends, its defaults, its template."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway.adapters.tokenizer_hf import HfTokenizer, ModelFilesError, load_model
from gateway.core.errors import RequestRejected
from gateway.core.prompt import Message
from gateway.core.types import ModelInfo
from tests.unit.gateway.model_folder import END, START, model_folder

HI = [Message(role="user", content="hi")]


def folder_with(tmp_path: Path, **files: Any) -> Path:
    """A copy of the small model's folder, JSON files replaced (None: removed)."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder(), folder)
    for name, value in files.items():
        path = folder / (name + (".jinja" if name == "chat_template" else ".json"))
        if value is None:
            path.unlink()
        else:
            path.write_text(json.dumps(value))
    return folder


def load(folder: Path, max_model_len: int = 0) -> tuple[ModelInfo, HfTokenizer]:
    """With one thread."""
    return load_model(folder, name="m", max_model_len=max_model_len, threads=1)


def test_the_models_own_numbers() -> None:
    """Context, vocabulary and the one end."""
    info, tokenizer = load(model_folder())
    assert (info.max_model_len, info.eos_token_ids) == (512, (END,))
    assert info.vocab_size == tokenizer.vocab_size
    assert (info.default_temperature, info.default_top_p, info.default_top_k) == (1.0, 1.0, 0)
    assert load(model_folder(), max_model_len=100)[0].max_model_len == 100
    assert load(model_folder(), max_model_len=1000)[0].max_model_len == 512


def test_ends_and_defaults_of_generation_config(tmp_path: Path) -> None:
    """A list of ends, the tokenizer's own among them; sampling as the model's makers want it."""
    generation = {"eos_token_id": [7, 8], "temperature": 0.6, "top_p": 0.9, "top_k": 40}
    info, _ = load(folder_with(tmp_path, generation_config=generation))
    assert info.eos_token_ids == (7, 8, END)
    assert (info.default_temperature, info.default_top_p, info.default_top_k) == (0.6, 0.9, 40)


def test_ends_of_config(tmp_path: Path) -> None:
    """Where there is no generation_config; the text part of a larger model counts."""
    config = {"text_config": {"eos_token_id": 9, "vocab_size": 400, "max_position_embeddings": 64}}
    info, _ = load(folder_with(tmp_path, generation_config=None, config=config))
    assert (info.eos_token_ids, info.vocab_size, info.max_model_len) == ((9, END), 400, 64)


def test_broken_folders(tmp_path: Path) -> None:
    """Named by the file."""
    with pytest.raises(ModelFilesError, match="max_position_embeddings"):
        load(folder_with(tmp_path, config={}))
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(ModelFilesError, match="config"):
        load(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json"):
        load(tmp_path / "model")


async def test_a_template_inside_tokenizer_config(tmp_path: Path) -> None:
    """One, or the one named default of several; special tokens as strings or objects."""
    plain = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    for template in (
        plain,
        [{"name": "x", "template": "-"}, {"name": "default", "template": plain}],
    ):
        named = {"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>"}
        folder = folder_with(
            tmp_path, chat_template=None, tokenizer_config={**named, "chat_template": template}
        )
        _, tokenizer = load(folder)
        ids = list(await tokenizer.encode_chat(HI))
        assert (ids[0], ids[-1], tokenizer.decode(ids)) == (START, END, "hi")
        shutil.rmtree(folder)


async def test_no_template(tmp_path: Path) -> None:
    """Chats are refused, completions are not."""
    _, tokenizer = load(folder_with(tmp_path, chat_template=None))
    with pytest.raises(RequestRejected, match="no chat template"):
        await tokenizer.encode_chat(HI)
    assert tokenizer.decode(await tokenizer.encode_text("hi")) == "hi"


async def test_one_opening_token(tmp_path: Path) -> None:
    """The tokenizer adds it to a raw prompt, unless it is there; a template brings its own."""
    folder = folder_with(tmp_path)
    tokenizer_json = json.loads((folder / "tokenizer.json").read_text())
    tokenizer_json["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "s", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"s": {"id": "s", "ids": [START], "tokens": ["<|start|>"]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    _, tokenizer = load(folder)
    for text in ("hi", "<|start|>hi"):
        ids = list(await tokenizer.encode_text(text))
        assert ids.count(START) == 1
        assert ids[0] == START
    ids = list(await tokenizer.encode_chat(HI))
    assert ids.count(START) == 2  # one opens each turn of this template
    assert ids[0] == START
    assert ids[1] != START
