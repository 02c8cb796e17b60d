"""AIME 2024: 30 problems with whole numbers from 0 to 999 as answers."""

from __future__ import annotations

from dms_train.evaluation.tasks.competition_math import CompetitionMath
from dms_train.evaluation.tasks.data_files import DataSource


class Aime24(CompetitionMath):
    """Both papers of 2024."""

    name = "aime24"
    title = "AIME 24"
    where = "the file is data/train-00000-of-00001.parquet of HuggingFaceH4/aime_2024"
    source = DataSource(
        repo="HuggingFaceH4/aime_2024",
        file="data/train-00000-of-00001.parquet",
        rows=30,
    )
