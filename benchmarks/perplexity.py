"""Perplexity of a fixed text as a worker computes it: paged, in chunks, by the forward it serves.

The text stands beside this file. How far two forwards of one model are apart in it says what
rounding its weights costs; by itself the figure says little.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

TEXT = Path(__file__).with_suffix(".txt")
BLOCK_SIZE, CHUNK = 16, 256


def token_ids(folder: Path) -> list[int]:
    """The text in the tokens of a model."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found: list[int] = tokenizer(TEXT.read_text())["input_ids"]
    return found


@torch.inference_mode()
def perplexity(model: Any, backend: str, tokens: Sequence[int]) -> float:
    """Of all tokens but the first, each after those before it; `model` is a models.LoadedModel."""
    from gpu_worker import kv_cache, models
    from gpu_worker.attention import PagedContext, make_backend

    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    layout = kv_cache.layout(model.kv_shape, BLOCK_SIZE, num_blocks)
    cache = kv_cache.allocate(layout, model.dtype, model.device)
    context = PagedContext(cache, make_backend(backend, model.device))
    table = torch.arange(num_blocks, dtype=torch.int32, device=model.device)
    ids = torch.tensor(tokens, device=model.device)
    last, total = len(tokens) - 1, 0.0
    for begin in range(0, last, CHUNK):
        end = min(begin + CHUNK, last)
        logits = models.forward(
            model,
            context,
            models.one_row(begin, end - begin, table, BLOCK_SIZE),
            ids[begin:end],
            torch.arange(begin, end, device=model.device),
            torch.arange(end - begin, device=model.device),
        )
        losses = F.cross_entropy(logits.float(), ids[begin + 1 : end + 1], reduction="none")
        total += float(losses.double().sum())
    return math.exp(total / last)
