"""Decode steps of cache policies with equal budgets."""

from benchmarks.records import Table

TABLES = (
    Table(
        "*/policies_decode*.json",
        "docs/performance/serving.md",
        ("dms_train/inference", "dms_train/kernels/decode", "dms_train/kernels/prefill"),
    ),
)
