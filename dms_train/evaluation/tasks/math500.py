"""MATH-500: 500 problems of the MATH test set, answers in LaTeX."""

from __future__ import annotations

from dms_train.evaluation.tasks.competition_math import CompetitionMath
from dms_train.evaluation.tasks.data_files import DataSource


class Math500(CompetitionMath):
    """The subset of Lightman et al. (2024)."""

    name = "math500"
    title = "MATH 500"
    where = "the file is test.jsonl of HuggingFaceH4/MATH-500"
    source = DataSource(
        repo="HuggingFaceH4/MATH-500",
        file="test.jsonl",
        rows=500,
    )
