"""What each of the scheduler's decisions is worth, on the real stack and the real model."""
