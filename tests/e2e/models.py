"""Small model folders for tests: a tokenizer without a model, and a random Llama of two layers."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

VOCAB_SIZE = 1024
EOS = 2
_SPECIAL = ("<|start|>", "<|end|>", "<|eos|>")
_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_text_files(folder: Path) -> None:
    """Tokenizer and template: bytes, and words " w259" ... so that every token has a text."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {token: i for i, token in enumerate(_SPECIAL)}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[char] = len(vocab)
    while len(vocab) < VOCAB_SIZE:
        vocab[f"Ġw{len(vocab)}"] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"eos_token": _SPECIAL[EOS]})
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    _write(folder / "generation_config.json", {"eos_token_id": EOS})


def write_stub_model(folder: Path, max_model_len: int = 4096) -> Path:
    """What a gateway needs, and nothing that a worker could load."""
    write_text_files(folder)
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": max_model_len,
        "eos_token_id": EOS,
    }
    _write(folder / "config.json", config)
    return folder


def write_tiny_llama(folder: Path, seed: int = 7) -> Path:
    """Two layers, grouped heads, random float32 weights wide enough that outputs vary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        bos_token_id=None,
        dtype="float32",
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(torch.float32)
    torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    write_text_files(folder)
    return folder


def _write(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data))
