"""A teacher trained from scratch, its retrofits and their evaluation: `python -m research lab`.

`scales` holds the sizes, `tasks` how data is made and evaluated, `steps` the commands in order.
"""

from benchmarks.records import Table

TABLES = (
    Table(
        "*/wall_clock.json",
        "docs/science.md",
        ("dms_train/inference", "dms_train/kernels/decode", "dms_train/kernels/prefill"),
    ),
)
