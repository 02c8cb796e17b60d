"""The GPT model of a pipeline chunk.

Start with `model` (student and frozen teacher); `weights` reads and writes Hugging Face tensors,
`mapping` maps their names, `recording` gathers the self-test of an export.
"""
