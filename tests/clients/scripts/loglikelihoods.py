"""Log likelihoods by transformers itself: pairs of token ids in, sums and greediness out.

Runs in Quire's own environment, which has torch: `loglikelihoods.py MODEL < PAIRS > SCORES`.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """In float32; a context and what goes on from it are tokenized as lm-eval does."""
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    scores = []
    for context, going_on in json.load(sys.stdin):
        whole = tokenizer(context + going_on).input_ids
        start = len(tokenizer(context.rstrip()).input_ids)
        with torch.inference_mode():
            rows = model(torch.tensor([whole])).logits[0, start - 1 : -1].log_softmax(-1)
        target = torch.tensor(whole[start:])
        total = rows.gather(1, target[:, None]).sum().item()
        scores.append([total, bool((rows.argmax(-1) == target).all())])
    json.dump(scores, sys.stdout)


if __name__ == "__main__":
    main()
