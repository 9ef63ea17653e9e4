"""What a model's folder says: its tokenizer, its ends, its defaults, its template."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

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


def opening_with(token: int) -> dict[str, Any]:
    """A post-processor that puts a token before every text."""
    return {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "s", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"s": {"id": "s", "ids": [token], "tokens": ["<|start|>"]}},
    }


async def test_one_opening_token(tmp_path: Path) -> None:
    """The tokenizer adds it to a raw prompt, unless it is there; a template brings its own."""
    folder = folder_with(tmp_path)
    tokenizer_json = json.loads((folder / "tokenizer.json").read_text())
    tokenizer_json["post_processor"] = opening_with(START)
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


def test_defaults_that_shape_the_distribution(tmp_path: Path) -> None:
    """vLLM takes them from the same file."""
    generation = {"eos_token_id": END, "min_p": 0.05, "repetition_penalty": 1.1}
    info, _ = load(folder_with(tmp_path, generation_config=generation))
    assert (info.default_min_p, info.default_repetition_penalty) == (0.05, 1.1)


async def test_special_tokens_are_shown_if_asked_for() -> None:
    """By the detokenizer as by the decoding of all at once."""
    _, tokenizer = load(model_folder())
    ids = [START, *await tokenizer.encode_text("hé"), END]
    for skip, text in ((True, "hé"), (False, "<|start|>hé<|end|>")):
        detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
        pieces = "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()
        assert pieces == text
        assert await tokenizer.decode_ids(ids, skip_special_tokens=skip) == text


async def test_bytes_of_tokens() -> None:
    """Joined they are the text's bytes; special tokens have theirs."""
    _, tokenizer = load(model_folder())
    text = "the fox é\u2581😀"
    ids = await tokenizer.encode_text(text)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()
    assert tokenizer.token_bytes(END) == b"<|end|>"
    assert tokenizer.token_bytes(10**6) == b""


async def test_bytes_of_tokens_of_another_kind_of_vocabulary(tmp_path: Path) -> None:
    """One that writes a low line for spaces, and single bytes by their number."""
    vocab = {"<unk>": 0, "\u2581hi": 1, "<0xC3>": 2, "<0xA9>": 3, "x": 4}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<s>"])
    folder = folder_with(tmp_path)
    tokenizer.save(str(folder / "tokenizer.json"))
    _, loaded = load(folder)
    assert [loaded.token_bytes(i) for i in range(1, 7)] == [
        b" hi", b"\xc3", b"\xa9", b"x", b"<s>", b"",
    ]  # fmt: skip
    detokenizer = loaded.detokenizer(skip_special_tokens=False)
    assert "".join(detokenizer.push(i) for i in (4, 2, 3, 5)) + detokenizer.flush() == "xé<s>"


async def test_the_opening_token_can_be_left_out(tmp_path: Path) -> None:
    """For a client that has written all of its prompt itself."""
    folder = folder_with(tmp_path)
    tokenizer_json = json.loads((folder / "tokenizer.json").read_text())
    tokenizer_json["post_processor"] = opening_with(START)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    _, tokenizer = load(folder)
    whole = list(await tokenizer.encode_text("hi"))
    assert whole[0] == START
    assert list(await tokenizer.encode_text("hi", add_special_tokens=False)) == whole[1:]


async def test_the_end_of_a_conversation() -> None:
    """Open for an answer, closed, or open within the last message."""
    _, tokenizer = load(model_folder())
    answered = await tokenizer.encode_chat(HI)
    closed = await tokenizer.encode_chat(HI, add_generation_prompt=False)
    opened = await tokenizer.encode_chat(
        HI, add_generation_prompt=False, continue_final_message=True
    )
    assert list(answered)[: len(closed)] == list(closed)
    assert list(closed)[: len(opened)] == list(opened)
    assert END not in opened
