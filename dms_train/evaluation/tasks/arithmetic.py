"""Modular arithmetic with spot checks: a written search whose answer may be wrong.

For models that were trained on the documents of `dms-data arithmetic`. An ideal model answers
right with probability 0.404 in a chain, whatever the problem, and chains err independently: this
task measures what a majority vote gains.
"""

from __future__ import annotations

from dms_train.evaluation.tasks.base import Aggregate, TaskSampling
from dms_train.evaluation.tasks.word_problems import WordProblems


class Arithmetic(WordProblems):
    """The answer that most chains give must be the common root."""

    name = "arithmetic"
    title = "Modular arithmetic"
    where = "dms-data arithmetic-problems --out FILE --problems 400 makes one"
    aggregate = Aggregate.VOTE
    sampling = TaskSampling(temperature=0.6, top_p=1.0)
