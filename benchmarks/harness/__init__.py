"""lm-evaluation-harness on the engine beside transformers: `python -m benchmarks.harness`."""

from benchmarks.records import Table

TABLES = (
    Table(
        "*/harness*.json",
        "docs/guides/evaluation.md",
        (
            "dms_train/evaluation/harness",
            "dms_train/inference",
            "dms_train/kernels/decode",
            "dms_train/kernels/prefill",
        ),
    ),
)
