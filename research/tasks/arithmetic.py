"""Modular arithmetic with spot checks: a written search whose answer may be wrong.

For models that were trained on the documents of `python -m research data arithmetic`. A chain of an
ideal model is right with probability 0.404 on every problem, and chains err independently. The task
measures the gain of a majority vote.
"""

from __future__ import annotations

from dms_train.evaluation.tasks.base import Aggregate, TaskSampling
from research.tasks.word_problems import WordProblems


class Arithmetic(WordProblems):
    """Task whose majority answer must be the common root."""

    name = "arithmetic"
    title = "Modular arithmetic"
    where = "python -m research data arithmetic-problems --out FILE --problems 400 makes one"
    aggregate = Aggregate.VOTE
    sampling = TaskSampling(temperature=0.6, top_p=1.0)
