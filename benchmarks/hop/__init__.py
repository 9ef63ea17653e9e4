"""What the way between scheduler and workers costs: see benchmarks.control_plane."""
