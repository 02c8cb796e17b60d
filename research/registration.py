"""Add the tasks and scorers of the experiments to those of `dms-eval`, in this process."""

from __future__ import annotations

from dms_train.evaluation.scorers.registry import register_scorer
from dms_train.evaluation.tasks.registry import register_task
from research.scorers.countdown import CountdownScorer
from research.scorers.words import WordsScorer
from research.tasks.arithmetic import Arithmetic
from research.tasks.countdown import Countdown
from research.tasks.lab_linear_1d import LabLinear1d
from research.tasks.lab_niah import LabNiah
from research.tasks.lab_variable_tracking import LabVariableTracking

TASKS = (Arithmetic, Countdown, LabLinear1d, LabNiah, LabVariableTracking)
SCORERS = (CountdownScorer, WordsScorer)


def register() -> None:
    """Register all tasks and scorers."""
    for task in TASKS:
        register_task(task)
    for scorer in SCORERS:
        register_scorer(scorer)
