"""lm-evaluation-harness on the engine beside transformers: `python -m benchmarks.harness`."""
