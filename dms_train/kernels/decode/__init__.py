"""Decode steps over a compact cache in pages.

Start with `paged` (the tensors of the cache) and `reference` (a step in plain loops);
`triton_append` stores a token, `triton_attention` attends to the live slots, `slots` does so with
torch operations.
"""
