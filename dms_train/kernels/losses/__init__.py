"""Losses over a vocabulary, row by row: `vocabulary` in torch, `triton_vocabulary` fused."""
