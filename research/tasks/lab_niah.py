"""Needle in a haystack in the words of the lab, zero-shot.

For models that were trained on the documents of `python -m research data lab-niah`
(`research/data/lab_niah.py`).
"""

from __future__ import annotations

from dms_train.evaluation.tasks.base import Aggregate, TaskSampling
from research.tasks.word_problems import WordProblems


class LabNiah(WordProblems):
    """Task that asks for the three numbers of a held-out key."""

    name = "lab_niah"
    title = "NIAH (lab)"
    where = "python -m research data lab-niah-problems --out FILE --problems 400 makes one"
    aggregate = Aggregate.MEAN
    sampling = TaskSampling(temperature=0.0, top_p=1.0, max_tokens=32)
