"""Finding a model's folder and naming its contents.

The digest covers the files that decide what token ids mean; a gateway does not use a worker whose
digest differs from its own.
"""

import hashlib
from pathlib import Path

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def model_dir(model: str, *, weights: bool) -> Path:
    """The local folder of `model`, a folder or a hub id. Raises FileNotFoundError or OSError."""
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    if folder.is_absolute() or model.count("/") != 1:
        raise FileNotFoundError(f"QUIRE_MODEL={model!r}: no folder with a config.json, no hub id")
    from huggingface_hub import snapshot_download

    patterns = [*TEXT_FILES, *(["*.safetensors", "*.safetensors.index.json"] if weights else [])]
    return Path(snapshot_download(model, allow_patterns=patterns))


def model_digest(folder: Path) -> str:
    """SHA-256 over names and contents of TEXT_FILES, 64 hex digits."""
    digest = hashlib.sha256()
    for name in TEXT_FILES:
        path = folder / name
        data = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def served_name(configured: str, model: str) -> str:
    """The name in the API: as configured, or the last part of the model's path."""
    return configured or Path(model).name
