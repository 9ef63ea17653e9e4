"""Small models with random weights, two layers each, saved as transformers saves them.

Weights are drawn wider than usual: with the usual ones a random model says one token for ever, and
attention hardly decides anything.
"""

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
WINDOW = 24  # of the families that have one: shorter than most contexts here
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
    "gpt_oss": (8, 2),
    "mixtral": (4, 2),
    "qwen3_moe": (4, 1),
}
FAMILIES = tuple(HEADS)
EXPERTS = ("gpt_oss", "mixtral", "qwen3_moe")  # computed by transformers' own experts

# What makes each family another one; the layers of some differ in their window.
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_TWO_OF_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "phi3": {
        "sliding_window": WINDOW,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "gemma2": {
        **_MIXED,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,  # low enough to bend most scores here
        "final_logit_softcapping": 20.0,
    },
    "gemma3": {**_MIXED, "query_pre_attn_scalar": 16},
    "gpt_oss": {
        **_MIXED,
        **_TWO_OF_FOUR,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": POSITIONS // 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "mixtral": {"sliding_window": None, **_TWO_OF_FOUR},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}


def config(family: str) -> Any:
    """The configuration of a family's small model."""
    import transformers

    heads, kv_heads = HEADS[family]
    special = SPECIAL.get(family, {})
    if family not in ("qwen2", "phi3"):  # these have no setting for it
        special = {"head_dim": 16, **special}
    return transformers.AutoConfig.for_model(
        "gemma3_text" if family == "gemma3" else family,
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
