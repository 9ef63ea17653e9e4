"""Redis, gRPC and clock behind the ports."""
