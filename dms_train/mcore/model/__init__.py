"""The GPT model of a pipeline chunk.

Start with `model` (student and frozen teacher); `weights` reads and writes Hugging Face tensors,
`mapping` maps their names, `gathering` joins them from all ranks, `eviction_channel` zeroes rows of
projections, `recording` gathers the self-test of an export.
"""
