"""Accuracy of finding a needle, by context length and depth, from runs of the task `niah`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling.results import RunResult
from dms_train.evaluation.tasks.niah import Niah, needles

_DEPTHS = 101  # depths are whole percents from 0 to 100


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleCell:
    """Prompts of one length whose needles have similar depths.

    Attributes:
        label: Model and policy.
        length: Context length in tokens.
        depth: Smallest depth of the band, in percent of the sentences.
        accuracy: Mean score of the chains.
        documents: Number of prompts.
    """

    label: str
    length: int
    depth: int
    accuracy: float
    documents: int


def needle_cells(runs: Iterable[RunResult], bands: int) -> list[NeedleCell]:
    """Return the accuracy for each label, length and band of depths, in this order.

    Args:
        runs: Runs of `niah` with generated prompts; others are left out.
        bands: Number of bands of equal width.

    Raises:
        EvaluationError: No run is of this task, its prompts came from a file, or different models
            have the same label.
    """
    scores: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    models: dict[str, Any] = {}
    for run in runs:
        if run.task == Niah.name:
            task = run.header["config"]["task"]
            model = (run.header["config"]["model"], run.header["config"]["policy"])
            if models.setdefault(run.label, model) != model:
                raise EvaluationError(
                    f"{run.label}: runs of different models or policies have this name; "
                    "draw them one after the other"
                )
            for depth, score in _scores(run):
                band = depth * bands // _DEPTHS
                scores[run.label, task["context_length"], band].append(score)
    if not scores:
        raise EvaluationError(f"no run of the task {Niah.name}; run dms-eval task.name=niah first")
    return [
        NeedleCell(
            label=label,
            length=length,
            depth=-(-band * _DEPTHS // bands),
            accuracy=sum(found) / len(found),
            documents=len(found),
        )
        for (label, length, band), found in sorted(scores.items())
    ]


def _scores(run: RunResult) -> list[tuple[int, float]]:
    """Return depth and score of every prompt; depths are drawn again from the run's seed."""
    task = run.header["config"]["task"]
    count = max((int(name) for name in run.documents), default=-1) + 1
    drawn = list(needles(count, task["seed"]))
    scores = []
    for name, chains in run.documents.items():
        needle = drawn[int(name)]
        right = [all(chain["correct"]) for chain in chains]
        answers = {chain["answers"][0] for chain in chains if all(chain["correct"])}
        if task["fixture"] or not answers <= {needle.value}:
            raise EvaluationError(
                f"{run.folders[0]}: its prompts came from a file; only generated ones have depths"
            )
        scores.append((needle.depth, sum(right) / len(right)))
    return scores


def grid(cells: Sequence[NeedleCell]) -> tuple[list[int], list[int], list[list[float | None]]]:
    """Return the lengths, the depths and the accuracies [depth][length] of the cells of a label."""
    lengths, depths = (
        sorted({getattr(cell, name) for cell in cells}) for name in ("length", "depth")
    )
    known = {(cell.depth, cell.length): cell.accuracy for cell in cells}
    return lengths, depths, [[known.get((d, n)) for n in lengths] for d in depths]
