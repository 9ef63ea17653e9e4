"""Quire on one machine: set-up, model cache, launcher.

`setup` and `preflight` run on a system Python before anything is installed: standard library only.
"""
