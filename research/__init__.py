"""Experiments with small teachers, run from a checkout: `python -m research NAME`."""
