"""Real processes, from the client's side."""
