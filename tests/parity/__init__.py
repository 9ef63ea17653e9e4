"""The worker's tokens and logits against transformers' own."""
