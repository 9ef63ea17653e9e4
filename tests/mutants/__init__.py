"""Planted bugs: patches against shipped code, and the runner that shows which test finds each."""
