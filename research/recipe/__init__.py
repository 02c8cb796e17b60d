"""Recipes of real models: from the download to the report and the model cards."""

from benchmarks.records import Table

_MEASURED = ("dms_train/method", "dms_train/training", "dms_train/inference/policies")
TABLES = (Table("*/smollm2_*.json", "docs/models.md", _MEASURED),)
