"""Variable tracking in the words of the lab, zero-shot.

For models that were trained on the documents of `python -m research data lab-variable-tracking`
(`research/data/lab_variable_tracking.py`).
"""

from __future__ import annotations

from dms_train.evaluation.tasks.base import Aggregate, TaskSampling
from research.tasks.word_problems import WordProblems


class LabVariableTracking(WordProblems):
    """Task that asks for the variables of a value, in order; their names are held out."""

    name = "lab_variable_tracking"
    title = "VT (lab)"
    where = (
        "python -m research data lab-variable-tracking-problems --out FILE --problems 400 makes one"
    )
    aggregate = Aggregate.MEAN
    sampling = TaskSampling(temperature=0.0, top_p=1.0, max_tokens=32)
