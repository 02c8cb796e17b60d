"""Seconds that training waits for a checkpoint: `python -m benchmarks.checkpoint`."""
