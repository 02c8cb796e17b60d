"""Distributed checkpoints of a run.

Start with `reading` (which checkpoint is valid, weights into any layout) and `saving` (background
writers); `state` is the JSON record of a checkpoint, `checksums` its integrity, `optimizer_shards`
the optimizer state without a gather.
"""
