"""The gateway's decisions: pure, without IO, clocks or generated classes."""
