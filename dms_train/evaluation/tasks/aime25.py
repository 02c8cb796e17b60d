"""AIME 2025: 30 problems with whole numbers from 0 to 999 as answers."""

from __future__ import annotations

from dms_train.evaluation.tasks.competition_math import CompetitionMath
from dms_train.evaluation.tasks.data_files import DataSource


class Aime25(CompetitionMath):
    """Both papers of 2025."""

    name = "aime25"
    title = "AIME 25"
    where = "the file is test.jsonl of math-ai/aime25"
    source = DataSource(
        repo="math-ai/aime25",
        file="test.jsonl",
        rows=30,
    )
