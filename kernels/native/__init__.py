"""Kernels for CPUs in C++: compiled at set-up by build, loaded by library, called by operators."""
