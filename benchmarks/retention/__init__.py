"""Kept tokens per position and head: `python -m benchmarks.retention`."""
