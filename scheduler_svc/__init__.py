"""Control plane: decides every step of every worker. The pure part is `core`."""
