"""The real model for tests, through the launcher's cache; converted on first use."""

import os
from functools import cache
from pathlib import Path

from deploy.local import model, options


@cache
def real_model_dir() -> Path:
    """Folder of SmolLM2-135M-Instruct in bfloat16 (QUIRE_CACHE_DIR or its default)."""
    configured = os.environ.get("QUIRE_CACHE_DIR", "")
    folder = Path(configured).expanduser() if configured else options.DEFAULT_CACHE_DIR
    return model.ensure(model.SMOLLM2, folder)
