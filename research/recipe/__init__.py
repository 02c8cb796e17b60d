"""Recipes of real models: from the download to the report and the model cards."""

from benchmarks.records import Table

_MEASURED = ("dms_train/method", "dms_train/training", "dms_train/inference/policies")
TABLES = tuple(
    Table(f"*/{name}_*.json", "docs/models.md", _MEASURED) for name in ("smollm2", "qwen25_coder")
)
