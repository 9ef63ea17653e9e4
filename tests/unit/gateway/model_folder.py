"""A small model's text files: a byte-level vocabulary with a few merges, made on the spot."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] | trim + '<|end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
TEXT = "the quick brown fox jumps over the lazy dog and then the fox says hello to the world again"
START, END, PAD = 0, 1, 2


def make_tokenizer() -> Tokenizer:
    """256 bytes, some merges, three special tokens and one that is only added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|start|>", "<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.add_tokens([AddedToken("<tool> call", special=False)])
    return tokenizer


@cache
def model_folder(template: str = TEMPLATE, eos: int = END) -> Path:
    """The folder, one per combination and process."""
    folder = Path(mkdtemp(prefix="quire-model-"))
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    named = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder
