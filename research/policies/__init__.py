"""Cache policies at every ratio on exam sheets and stories: `python -m research policies`.

`cases` names what is measured, `exam` and `stories` measure it, `table` writes the tables.
"""

from benchmarks.records import Table

TABLES = (Table("cpu/policies*.jsonl", "docs/methods.md", ("dms_train/inference/policies",)),)
