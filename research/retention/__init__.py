"""Kept tokens per position and head: `python -m research retention`."""
