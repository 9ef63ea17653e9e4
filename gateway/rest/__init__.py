"""The OpenAI-compatible REST interface."""
