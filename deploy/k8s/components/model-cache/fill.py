"""Fetches a model into the volume of models, once, and verifies it before anyone sees it.

MODEL_ID and MODEL_REVISION name it at the hub, MODEL_DIR is where it will stand. Files go to a
folder beside that one, their SHA-256 sums are compared with the hub's, and one rename puts them
into place. A folder that is there is left alone: another model takes another folder. Runs in the
gateway's image, which has the hub's client.
"""

import hashlib
import os
import sys
from pathlib import Path

PATTERNS = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model")
CHUNK_BYTES = 1 << 24


def sha256(path: Path) -> str:
    """Of a file's content, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def damaged(folder: Path, sums: dict[str, str]) -> list[str]:
    """Files that are missing or differ from their sum."""
    return [
        name
        for name, expected in sorted(sums.items())
        if not (folder / name).is_file() or sha256(folder / name) != expected
    ]


def fill(model_id: str, revision: str, target: Path) -> None:
    """Raises what the hub's client raises, and SystemExit where a file is damaged."""
    from fnmatch import fnmatch

    from huggingface_hub import HfApi, snapshot_download

    if (target / "config.json").is_file():
        print(f"{target} is there")
        return
    found = HfApi().model_info(model_id, revision=revision, files_metadata=True)
    # Of large files the hub says the SHA-256; small ones are verified by its client alone.
    sums = {
        entry.rfilename: entry.lfs.sha256
        for entry in found.siblings or []
        if entry.lfs is not None and any(fnmatch(entry.rfilename, p) for p in PATTERNS)
    }
    partial = target.with_name(f".{target.name}.partial")
    print(f"fetching {model_id} at {found.sha} into {partial}", flush=True)
    snapshot_download(
        model_id, revision=found.sha, local_dir=partial, allow_patterns=list(PATTERNS)
    )
    wrong = damaged(partial, sums)
    if wrong:
        for name in wrong:
            (partial / name).unlink(missing_ok=True)
        sys.exit(f"damaged, fetched again at the next try: {', '.join(wrong)}")
    partial.rename(target)
    print(f"{target} is complete: {len(sums)} sums verified", flush=True)


if __name__ == "__main__":
    fill(os.environ["MODEL_ID"], os.environ["MODEL_REVISION"], Path(os.environ["MODEL_DIR"]))
