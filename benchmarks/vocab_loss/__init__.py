"""Losses behind the output layer: `python -m benchmarks.vocab_loss`."""
