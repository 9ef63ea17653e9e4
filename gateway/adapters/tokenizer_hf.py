"""The model's text side from its folder: tokenizer.json, chat template, configuration.

Uses the tokenizers library only. Encoding and templates run in a thread pool with a bounded number
of waiting jobs.
"""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer

from gateway.core.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from gateway.core.errors import QueueFullError, RejectReason, RequestRejected
from gateway.core.prompt import ChatTemplate, Message, Piece
from gateway.core.types import ModelInfo
from servicekit import model_files

MAX_PENDING_JOBS = 1024
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
T = TypeVar("T")


class ModelFilesError(Exception):
    """The model's folder can't be served from; the message says why."""


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFilesError(f"{name} is not JSON") from error
    if not isinstance(data, dict):
        raise ModelFilesError(f"{name} is not an object")
    return data


def _named_tokens(folder: Path) -> dict[str, str]:
    """bos_token and its like, as strings."""
    names: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        data = _read_json(folder, file)
        for name in _NAMED_TOKENS:
            value = data.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                names[name] = value
    return names


def _template_source(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = _read_json(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


class HfTokenizer:
    """TokenizerPort."""

    def __init__(self, folder: Path, threads: int) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelFilesError("the model's folder has no tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._plain = Tokenizer.from_str(self._tokenizer.to_str())
        self._plain.encode_special_tokens = True
        named = _named_tokens(folder)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {t.content for t in added.values() if t.special} | set(named.values())
        self._bos = self._tokenizer.token_to_id(named.get("bos_token", ""))
        self.eos = self._tokenizer.token_to_id(named.get("eos_token", ""))
        source = _template_source(folder)
        self._template = None
        if source is not None:
            self._template = ChatTemplate(
                source,
                variables=named,
                special_tokens=sorted(special),
                now=lambda: datetime.now(tz=UTC).astimezone(),
            )
        self._added = added
        self._all_bytes = _token_bytes(self._tokenizer)
        self._token_bytes = _without_special(self._all_bytes, added)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._num_pending = 0

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """The tokens of a raw prompt, with the model's own opening token unless told otherwise."""
        return await self._in_pool(lambda: self._encode_text(text, add_special_tokens))

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Sequence[int]:
        """The tokens of a conversation put through the chat template."""
        template = self._template
        if template is None:
            raise RequestRejected(
                RejectReason.INVALID, "The model has no chat template.", param="messages"
            )
        return await self._in_pool(
            lambda: self._encode_pieces(
                template.render(
                    messages,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                )
            )
        )

    async def decode_ids(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, all at once."""
        return await self._in_pool(
            lambda: self.decode(ids, skip_special_tokens=skip_special_tokens)
        )

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, special ones too; half a character may be among it."""
        if self._all_bytes is not None:
            return self._all_bytes[token_id] if token_id < len(self._all_bytes) else b""
        if token_id in self._added:
            return self._added[token_id].content.encode()
        return _piece_bytes(self._tokenizer.id_to_token(token_id) or "")

    def detokenizer(
        self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> Detokenizer:
        """A detokenizer for one run of tokens that follows the tokens `after`."""
        table = self._token_bytes if skip_special_tokens else self._all_bytes
        if table is not None:
            return ByteDetokenizer(table)
        return WindowDetokenizer(
            lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens), after
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """All at once, as clients would see it."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def close(self) -> None:
        """Lets running jobs end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            # The client wrote the opening token itself.
            return ids[1:]
        return ids

    def _encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            tokenizer = self._tokenizer if piece.control else self._plain
            # The template writes the opening token where the model wants one.
            ids += tokenizer.encode(piece.text, add_special_tokens=False).ids
        return ids

    async def _in_pool(self, job: Callable[[], T]) -> T:
        if self._num_pending >= MAX_PENDING_JOBS:
            raise QueueFullError("Too many prompts wait to be tokenized.", retry_after_s=1)
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, job)
        finally:
            self._num_pending -= 1


def load_model(
    folder: Path, *, name: str, max_model_len: int, threads: int
) -> tuple[ModelInfo, HfTokenizer]:
    """Everything the gateway needs of a model. Raises ModelFilesError."""
    tokenizer = HfTokenizer(folder, threads)
    config = _read_json(folder, "config.json")
    text_config = config.get("text_config")
    config = {**config, **text_config} if isinstance(text_config, dict) else config
    generation = _read_json(folder, "generation_config.json")
    context = config.get("max_position_embeddings")
    if not isinstance(context, int):
        if not max_model_len:
            raise ModelFilesError("config.json has no max_position_embeddings; set max_model_len")
        context = max_model_len
    eos = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    if tokenizer.eos is not None:
        eos.append(tokenizer.eos)
    # Only what stands in the model's own file; transformers' class defaults are not written there.
    given = {k: generation[k] for k in _DEFAULTS if generation.get(k) is not None}
    info = ModelInfo(
        name=name,
        digest=model_files.model_digest(folder),
        vocab_size=int(config.get("vocab_size") or tokenizer.vocab_size),
        max_model_len=min(max_model_len, context) if max_model_len else context,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        default_temperature=float(given.get("temperature", 1.0)),
        default_top_p=float(given.get("top_p", 1.0)),
        default_top_k=int(given.get("top_k", 0)),
        default_min_p=float(given.get("min_p", 0.0)),
        default_repetition_penalty=float(given.get("repetition_penalty", 1.0)),
    )
    return info, tokenizer


def _token_bytes(tokenizer: Tokenizer) -> list[bytes] | None:
    """Bytes of every token of a byte-level vocabulary; None for others."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    inner = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    if [d.get("type") for d in inner] != ["ByteLevel"]:
        return None
    to_byte = _byte_level_alphabet()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for text, i in vocab.items():
        mapped = [to_byte.get(char) for char in text]
        known = [byte for byte in mapped if byte is not None]
        table[i] = bytes(known) if len(known) == len(mapped) else text.encode()
    return table


def _without_special(table: list[bytes] | None, added: dict[int, AddedToken]) -> list[bytes] | None:
    """The same with nothing for special tokens."""
    if table is None:
        return None
    special = {i for i, token in added.items() if token.special}
    return [b"" if i in special else text for i, text in enumerate(table)]


def _piece_bytes(piece: str) -> bytes:
    """Of a vocabulary that writes "\u2581" for spaces and <0x0A> for bytes."""
    if found := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(found.group(1))
    return piece.replace("\u2581", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Characters that byte-level vocabularies write for bytes."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in set(visible)]
    table = {chr(b): b for b in visible}
    table.update({chr(256 + i): b for i, b in enumerate(hidden)})
    return table
