"""Tasks of the lab: the commands that make their data, and how they are evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.lab.scales import Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class LabTask:
    """A task that a teacher learns, alone or in a mixture.

    Attributes:
        command: Of `dms-data`; `COMMAND-problems` makes its problems.
        weight: Of its samples in a mixture.
        searches: Whether a chain is a long search, evaluated at every length and width of the
            scale; otherwise it is a short answer, generated once.
        long: Whether some documents fill half the context, so that samples of the retrofits can
            begin with them.
        documents: Options of the command.
        options: Of both commands.
        problems: Of the second one alone.
        sinks: Tokens that `streaming_llm` keeps.
    """

    command: str
    weight: int
    searches: bool = True
    long: bool = True
    documents: tuple[str, ...] = ()
    options: Callable[[Scale], list[str]] = lambda scale: []
    problems: Callable[[Scale], list[str]] = lambda scale: []
    sinks: Callable[[Scale], int] = lambda scale: 4


_ANSWERS = ("--loss-on", "answer")  # what is hidden at random cannot be predicted before


def _context(scale: Scale) -> list[str]:
    return ["--context", str(scale.context)]


TASKS = {
    "countdown": LabTask(
        command="countdown",
        weight=4,
        options=lambda scale: ["--numbers", str(scale.numbers)],
        sinks=lambda scale: scale.numbers + 3,  # the prompt
    ),
    "arithmetic": LabTask(command="arithmetic", weight=3),
    "lab_niah": LabTask(
        command="lab-niah", weight=2, searches=False, documents=_ANSWERS, options=_context
    ),
    "lab_variable_tracking": LabTask(
        command="lab-variable-tracking",
        weight=2,
        searches=False,
        documents=_ANSWERS,
        options=_context,
        problems=lambda scale: ["--chains", str(min(40, scale.context // 32))],
    ),
    "lab_linear_1d": LabTask(
        command="lab-linear-1d", weight=2, searches=False, long=False, documents=_ANSWERS
    ),
}


def named(base: str, task: str) -> str:
    """The name of a folder or a step; Countdown's has no suffix."""
    return base if task == "countdown" else f"{base}_{task}"
