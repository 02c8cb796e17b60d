"""Cache policies at every ratio on exam sheets and stories: `python -m research policies`.

`cases` lists the cases, `exam` and `stories` measure them, and `table` writes the tables.
"""

from benchmarks.records import Table

TABLES = (Table("cpu/policies*.jsonl", "docs/methods.md", ("dms_train/inference/policies",)),)
