"""Training, prefill and decode attention beside their peers: `python -m benchmarks.attention`.

`train_cases`, `prefill_cases` and `decode_cases` hold the measurements, `accuracy` the errors;
`page` writes docs/performance/attention.md.
"""

from benchmarks.records import Table

TABLES = (
    Table(
        "*/attention.json",
        "docs/performance/attention.md",
        (
            "dms_train/kernels/train_attention",
            "dms_train/kernels/prefill",
            "dms_train/kernels/decode",
        ),
    ),
    Table(
        "*/accuracy.json", "docs/performance/attention.md", ("dms_train/kernels/train_attention",)
    ),
)
