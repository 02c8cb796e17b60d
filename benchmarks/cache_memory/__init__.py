"""Bytes of the compact cache over time: `python -m benchmarks.cache_memory`."""
