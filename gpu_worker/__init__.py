"""Data plane: executes step plans with a paged model and pushes tokens to gateways."""
