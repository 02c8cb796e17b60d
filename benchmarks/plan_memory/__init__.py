"""Predictions of `dms-plan` beside measurements: `python -m benchmarks.plan_memory`."""

from benchmarks.records import Table

TABLES = (
    Table(
        "*/plan_memory.json",
        "docs/guides/planning.md",
        ("dms_train/mcore", "dms_train/kernels/train_attention", "dms_train/kernels/losses"),
    ),
)
