"""Attention of packed documents."""

from benchmarks.records import Table

TABLES = (
    Table(
        "*/packed_attention.json",
        "docs/performance/attention.md",
        ("dms_train/kernels/train_attention",),
    ),
)
