"""Scorers by name: modules of this package and of other distributions.

Another distribution adds a scorer by an entry point of the group `dms_train.scorers` that names a
subclass of `Scorer`, a running program with `register_scorer`. The entry point has the scorer's
name.
"""

from __future__ import annotations

from dms_train.evaluation import scorers
from dms_train.evaluation.registry import Registry
from dms_train.evaluation.scorers.base import Scorer

GROUP = "dms_train.scorers"
_SCORERS = Registry(Scorer, scorers, GROUP, "scorer")  # type: ignore[type-abstract]


def register_scorer(scorer: type[Scorer]) -> None:
    """Add a scorer, or replace the one with its name, in this process."""
    _SCORERS.register(scorer)


def all_scorers() -> dict[str, Scorer]:
    """Return an instance of every scorer, by name.

    Raises:
        EvaluationError: An entry point cannot be used.
    """
    return _SCORERS.all()


def scorer(name: str) -> Scorer:
    """Return the scorer with this name.

    Raises:
        EvaluationError: The name is unknown, or its entry point cannot be used.
    """
    return _SCORERS.get(name)
