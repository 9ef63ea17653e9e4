"""A Llama with random weights, small enough for tests of the runner, and a runner for it."""

from pathlib import Path
from typing import Any

import structlog
import torch
import transformers

from gpu_worker import settings
from gpu_worker.runner import TorchRunner, load_runner

VOCABULARY, BLOCK_SIZE = 64, 4
HOST_GIB = 1 / 1024  # its blocks are of 1 KiB


def write_llama(folder: Path, num_layers: int = 2) -> Path:
    """The same weights each time; returns the folder."""
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load_llama(folder: Path, **changes: Any) -> TorchRunner:
    """On one thread, with 32 blocks of 4 tokens, and these settings."""
    values = {
        "model": folder,
        "num_threads": 1,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 32,
        "swap_space_gib": HOST_GIB,
        **changes,
    }
    argv = [
        part
        for name, value in values.items()
        for part in (f"--{name}".replace("_", "-"), str(value))
    ]
    return load_runner(settings.load(argv, {}), structlog.get_logger())
