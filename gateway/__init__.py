"""The door: OpenAI-compatible REST and gRPC in front of the queue. Stateless."""
