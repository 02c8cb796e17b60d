"""Linear equations in the words of the lab, zero-shot.

For models that were trained on the documents of `python -m research data lab-linear-1d`
(`research/data/lab_linear_1d.py`).
"""

from __future__ import annotations

from dms_train.evaluation.tasks.base import Aggregate, TaskSampling
from research.tasks.word_problems import WordProblems


class LabLinear1d(WordProblems):
    """Task that asks for the solution of a held-out equation."""

    name = "lab_linear_1d"
    title = "linear_1d (lab)"
    where = "python -m research data lab-linear-1d-problems --out FILE --problems 400 makes one"
    aggregate = Aggregate.MEAN
    sampling = TaskSampling(temperature=0.0, top_p=1.0, max_tokens=512)
