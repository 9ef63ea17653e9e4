"""Small models with random weights, two layers each, saved as transformers saves them.

Weights are drawn wider than usual: with the usual ones a random model says one token for ever, and
attention hardly decides anything.
"""

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
WINDOW = 24  # of Mistral, Phi-3 and Gemma's sliding layers: shorter than most contexts here
POSITIONS = 512

# Family: (query heads, KV heads): one, some and all heads share keys and values.
HEADS = {
    "llama": (4, 2),
    "qwen2": (4, 1),
    "qwen3": (8, 2),
    "mistral": (4, 4),
    "phi3": (4, 2),
    "gemma": (4, 1),
    "gemma2": (4, 2),
    "gemma3": (4, 2),
}
FAMILIES = tuple(HEADS)


def config(family: str) -> Any:
    """The configuration of a family's small model."""
    import transformers

    heads, kv_heads = HEADS[family]
    classes = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "mistral": transformers.MistralConfig,
        "phi3": transformers.Phi3Config,
        "gemma": transformers.GemmaConfig,
        "gemma2": transformers.Gemma2Config,
        "gemma3": transformers.Gemma3TextConfig,
    }
    special: dict[str, Any] = {"head_dim": 16} if family not in ("qwen2", "phi3") else {}
    if family in ("mistral", "phi3", "gemma2", "gemma3"):
        special["sliding_window"] = WINDOW
    if family in ("gemma2", "gemma3"):
        special["layer_types"] = ["sliding_attention", "full_attention"]
        special["query_pre_attn_scalar"] = 16
    if family == "phi3":
        special["rope_parameters"] = {
            "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5
        }  # fmt: skip
    return classes[family](
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=POSITIONS,
        initializer_range=0.25,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **special,
    )


def save(family: str, folder: Path, seed: int = 1) -> Path:
    """Writes the model and returns its folder."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config(family), dtype=torch.float32)
    model.eval().save_pretrained(folder)
    return folder


def reference(folder: Path) -> Any:
    """The same model with transformers' plain attention, in fp32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
