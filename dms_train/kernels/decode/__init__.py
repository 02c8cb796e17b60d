"""Decode steps over a compact cache in pages.

Start with `types` (the tensors of the cache), `interface` (what other packages call) and
`reference` (a step in plain loops). `triton_append` stores a token, `triton_attention` divides the
live slots among programs and attends to them with `triton_tiles`, `slots` attends with torch
operations.
"""
