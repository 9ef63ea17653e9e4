"""Turns one GGUF file into a model folder: bfloat16 safetensors, tokenizer, template, settings.

Run as `python -m deploy.local.gguf SOURCE TARGET` by the model cache.
"""

import sys
from pathlib import Path


def convert(gguf: Path, target: Path) -> None:
    """Dequantizes with transformers; the result holds all that a served model needs."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for path in target.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
