"""Speed of the inference engine beside vLLM."""

from benchmarks.records import Table

_ENGINE = ("dms_train/inference", "dms_train/kernels/decode", "dms_train/kernels/prefill")
_PAGE = "docs/performance/serving.md"
TABLES = (
    Table("*/serve.json", _PAGE, _ENGINE),
    Table("*/online.json", _PAGE, _ENGINE),
    Table("*/throughput.json", _PAGE, _ENGINE),
    Table("*/kernels_*.json", _PAGE, _ENGINE),
)
