"""Tasks of the lab: the commands that make their data, and how they are evaluated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from research.data.arithmetic import Arithmetic
from research.data.countdown import TRAINING, Countdown
from research.data.lab_linear_1d import LabLinear1d
from research.data.lab_niah import LabNiah
from research.data.lab_variable_tracking import LabVariableTracking
from research.data.token_documents import TokenTask
from research.lab.scales import Scale

_DRAWN = 4_000  # number of documents for the measured mean length
_SPARE = 1.1  # spare factor, because that mean is off by up to 7 % (three standard errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabTask:
    """Task that a teacher learns, alone or in a mixture.

    Attributes:
        command: Name of the `python -m research data` command; `NAME-problems` makes its problems.
        draws: Source of the command's documents.
        weight: Weight of its samples in a mixture.
        searches: True if a chain is a long search, evaluated at every length and width of the
            scale; otherwise it is a short answer, generated once.
        long: True if some documents fill half the context, so that samples of the retrofits can
            begin with them.
        documents: Options of the command.
        options: Options of both commands.
        learned: Further options for the teacher's documents.
        problems: Options of only the second command.
        sinks: Number of first tokens that `streaming_llm` keeps.
    """

    command: str
    draws: Callable[[Scale], TokenTask]
    weight: int
    searches: bool = True
    long: bool = True
    documents: tuple[str, ...] = ()
    options: Callable[[Scale], list[str]] = lambda scale: []
    learned: Callable[[Scale], list[str]] = lambda scale: []
    problems: Callable[[Scale], list[str]] = lambda scale: []
    sinks: Callable[[Scale], int] = lambda scale: 4

    def documents_of_a_sample(self, scale: Scale) -> float:
        """Return the mean number of documents in a packed sample, and a few more."""
        return _SPARE * scale.context / _mean_positions(self.draws(scale))


@lru_cache
def _mean_positions(task: TokenTask) -> float:
    """Return the mean positions of a document in a packed sample, one less than its tokens."""
    rng = random.Random(0)
    return sum(len(task.draw(rng).tokens) - 1 for _ in range(_DRAWN)) / _DRAWN


_ANSWERS = ("--loss-on", "answer")  # randomly hidden words cannot be predicted earlier


def _context(scale: Scale) -> list[str]:
    return ["--context", str(scale.context)]


TASKS = {
    "countdown": LabTask(
        command="countdown",
        draws=lambda scale: Countdown((TRAINING[scale.numbers],)),
        weight=4,
        options=lambda scale: ["--numbers", str(scale.numbers)],
        learned=lambda scale: ["--numbers", ",".join(map(str, scale.learned or (scale.numbers,)))],
        sinks=lambda scale: scale.numbers + 3,  # the prompt
    ),
    "arithmetic": LabTask(command="arithmetic", draws=lambda scale: Arithmetic(), weight=3),
    "lab_niah": LabTask(
        command="lab-niah",
        draws=lambda scale: LabNiah(context=scale.context),
        weight=2,
        searches=False,
        documents=_ANSWERS,
        options=_context,
    ),
    "lab_variable_tracking": LabTask(
        command="lab-variable-tracking",
        draws=lambda scale: LabVariableTracking(context=scale.context),
        weight=2,
        searches=False,
        documents=_ANSWERS,
        options=_context,
        problems=lambda scale: ["--chains", str(min(40, scale.context // 32))],
    ),
    "lab_linear_1d": LabTask(
        command="lab-linear-1d",
        draws=lambda scale: LabLinear1d(),
        weight=2,
        searches=False,
        long=False,
        documents=_ANSWERS,
    ),
}


def named(base: str, task: str) -> str:
    """Return the name of a folder or a step; Countdown's has no suffix."""
    return base if task == "countdown" else f"{base}_{task}"
