"""Time and memory of a training step beside its peers: `python -m benchmarks.train_step`.

`shapes` lists what is measured, `case` and `peer` run one case, `page` writes
docs/performance/training_step.md.
"""

from benchmarks.records import Table

TABLES = (
    Table(
        "*/train_step.json",
        "docs/performance/training_step.md",
        (
            "dms_train/mcore",
            "dms_train/method",
            "dms_train/kernels/layers",
            "dms_train/kernels/losses",
            "dms_train/kernels/train_attention",
        ),
    ),
)
