"""Cache policies at every ratio on exam sheets and stories: `python -m benchmarks.policies`.

`cases` names what is measured, `exam` and `stories` measure it, `table` writes the tables.
"""
