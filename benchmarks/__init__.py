"""Measurements of Quire from the outside. Each prints a table and writes JSON."""
