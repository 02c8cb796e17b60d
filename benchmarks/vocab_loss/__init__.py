"""Losses behind the output layer: `python -m benchmarks.vocab_loss`."""

from benchmarks.records import Table

TABLES = (
    Table("*/vocab_loss.json", "docs/concepts/distillation.md", ("dms_train/kernels/losses",)),
)
