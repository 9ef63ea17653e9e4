"""What stands behind the ports: Redis, the workers' token streams, the tokenizer."""
