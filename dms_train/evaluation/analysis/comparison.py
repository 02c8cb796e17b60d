"""Comparison of methods: points of each task, their averages, and margins with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dms_train.evaluation.analysis.pareto import BudgetPoint, frontier, margin
from dms_train.evaluation.bootstrap import Estimate
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.scaling.budgets import Budget
from dms_train.evaluation.scaling.results import DocumentMeasure, Point, RunResult
from dms_train.evaluation.scaling.store import differing_keys

VANILLA, AVERAGE = "Vanilla", "Average"
_RESAMPLES, _SEED = 500, 0


class Cost(NamedTuple):
    """Cost of a budget.

    Attributes:
        name: Field of `Point` and `DocumentMeasure`.
        title: Title in figures.
        unit: Unit of the axis.
    """

    name: str
    title: str
    unit: str


READS = Cost("kv_reads", "KV reads", "cache slots")
PEAK = Cost("peak_tokens", "peak tokens", "tokens")


class Mark(NamedTuple):
    """A point of a figure.

    Attributes:
        method: Vanilla, the method of the export or the name of a policy.
        budget: L-W-CR.
        cost: KV reads or peak tokens.
        accuracy: From 0 to 1.
        run: Configuration hash of its run; empty for an average.
    """

    method: str
    budget: Budget
    cost: float
    accuracy: float
    run: str


class Margin(NamedTuple):
    """A margin of two methods.

    Attributes:
        task: Title.
        first: Method.
        second: Method that `first` is compared with.
        value: Accuracy points, None where no interval of budgets is common.
        interval: 95 % bootstrap interval over documents; None without one.
    """

    task: str
    first: str
    second: str
    value: float | None
    interval: tuple[float, float] | None


class Comparison:
    """The points of several runs.

    Args:
        results: Runs of one original model and of the models made from it.

    Raises:
        EvaluationError: Runs of a task were prompted or sampled differently.
    """

    def __init__(self, results: Sequence[RunResult]) -> None:
        self.results = [result for result in results if result.documents]
        _require_costs(self.results)
        _require_same_sampling(self.results)
        self.points: list[tuple[RunResult, Point]] = [
            (result, point) for result in self.results for point in result.points()
        ]

    @property
    def tasks(self) -> list[str]:
        """Titles of the tasks, in alphabetical order."""
        return sorted({result.title for result in self.results})

    @property
    def methods(self) -> list[str]:
        """Names of the methods, Vanilla first."""
        names = {result.method for result in self.results}
        return sorted(names, key=lambda name: (name != VANILLA, name))

    def marks(self, task: str, cost: Cost) -> list[Mark]:
        """Return the points of a task, or their averages over all tasks."""
        if task == AVERAGE:
            return self._averages(cost)
        return [
            Mark(
                result.method,
                point.budget,
                getattr(point, cost.name),
                point.accuracy.value,
                result.header["config_hash"],
            )
            for result, point in self.points
            if result.title == task
        ]

    def _averages(self, cost: Cost) -> list[Mark]:
        """Average the budgets that every task has."""
        grouped: dict[tuple[str, Budget], dict[str, Mark]] = {}
        for task in self.tasks:
            for mark in self.marks(task, cost):
                grouped.setdefault((mark.method, mark.budget), {})[task] = mark
        count = len(self.tasks)
        return [
            Mark(
                method,
                budget,
                sum(mark.cost for mark in by_task.values()) / count,
                sum(mark.accuracy for mark in by_task.values()) / count,
                "",
            )
            for (method, budget), by_task in grouped.items()
            if len(by_task) == count
        ]

    def margins(self, cost: Cost) -> list[Margin]:
        """Compare every method with every earlier one, on each task."""
        samples: dict[tuple[str, str], list[Sample]] = {}
        for result in self.results:
            samples.setdefault((result.title, result.method), []).append(_sample(result, cost))
        margins = []
        for number, second in enumerate(self.methods):
            for first in self.methods[number + 1 :]:
                for task in self.tasks:
                    pair = [samples.get((task, method), []) for method in (first, second)]
                    margins.append(Margin(task, first, second, *margin_of(*pair)))
        return margins


def _require_costs(results: Sequence[RunResult]) -> None:
    """Refuse runs whose costs are unknown, because accuracy is shown against them."""
    for result in results:
        if result.header["config"]["model"].get("served"):
            raise EvaluationError(
                f"{result.folders[0]}: a server generated its chains, whose costs are unknown; "
                "leave it out. summary.json has its accuracy"
            )


def _require_same_sampling(results: Sequence[RunResult]) -> None:
    """Refuse runs of a task whose accuracies cannot stand in one figure."""
    first: dict[str, RunResult] = {}
    for result in results:
        other = first.setdefault(result.title, result)
        if differing := differing_keys(_asked(other), _asked(result)):
            raise EvaluationError(
                f"{result.folders[0]}: {result.title} with another {', '.join(differing)} than "
                f"{other.folders[0]}; give them to two reports"
            )


def _asked(result: RunResult) -> dict[str, Any]:
    """Return how a run prompts and samples, without seeds."""
    config = result.header["config"]
    sampling = {k: v for k, v in config.get("sampling", {}).items() if k != "seed"}
    return {"prompt_format": config["model"].get("prompt_format"), "sampling": sampling}


def line(marks: Sequence[Mark], method: str) -> list[BudgetPoint]:
    """Return the frontier of a method."""
    return frontier(BudgetPoint(m.cost, m.accuracy) for m in marks if m.method == method)


class Sample(NamedTuple):
    """Scores and costs of one run.

    Attributes:
        documents: Names of the documents.
        scores: [points, documents], from 0 to 1.
        costs: [points, documents], of which a point's cost is the mean.
    """

    documents: tuple[str, ...]
    scores: Tensor
    costs: Tensor


def margin_of(
    first: Sequence[Sample], second: Sequence[Sample]
) -> tuple[float | None, tuple[float, float] | None]:
    """Return value and interval of a `Margin` of two methods, from all runs of each."""
    samples = (first, second)
    whole = margin(*(_means(group, lambda count: torch.arange(count)) for group in samples))
    drawn = sorted(_resampled(samples)) if whole is not None else []
    interval = None
    if drawn:
        ends = torch.tensor(drawn, dtype=torch.float64).quantile(
            torch.tensor([0.025, 0.975], dtype=torch.float64)
        )
        interval = (ends[0].item(), ends[1].item())
    return whole, interval


def _sample(result: RunResult, cost: Cost) -> Sample:
    sweep = result.header["config"]["sweep"]
    measures: list[list[DocumentMeasure]] = [
        result.measures(index, width)
        for index in range(len(sweep["lengths"]))
        for width in sweep["widths"]
    ]
    scores = torch.tensor([[m.score for m in row] for row in measures], dtype=torch.float64)
    costs = torch.tensor(
        [[getattr(m, cost.name) for m in row] for row in measures], dtype=torch.float64
    )
    return Sample(tuple(result.documents), scores, costs)


def _means(samples: Sequence[Sample], draw: Callable[[int], Tensor]) -> list[BudgetPoint]:
    points = []
    for sample in samples:
        chosen = draw(len(sample.documents))
        pairs = zip(
            sample.costs[:, chosen].mean(1).tolist(),
            sample.scores[:, chosen].mean(1).tolist(),
            strict=True,
        )
        points += [BudgetPoint(*pair) for pair in pairs]
    return points


def _resampled(samples: Sequence[Sequence[Sample]]) -> Iterator[float]:
    """Yield margins of resampled documents; runs on the same documents share the draw."""
    generator = torch.Generator().manual_seed(_SEED)
    same = len({sample.documents for group in samples for sample in group}) == 1
    for _ in range(_RESAMPLES):
        known: dict[int, Tensor] = {}

        def draw(count: int, known: dict[int, Tensor] = known) -> Tensor:
            if not same:
                return torch.randint(count, (count,), generator=generator)
            if count not in known:
                known[count] = torch.randint(count, (count,), generator=generator)
            return known[count]

        value = margin(*(_means(group, draw) for group in samples))
        if value is not None:
            yield value


def accuracy_cells(comparison: Comparison) -> dict[tuple[str, str, float], Estimate]:
    """Return the accuracy of one chain of the longest length, by task, method and ratio."""
    longest: dict[tuple[str, str, float], tuple[Budget, Estimate]] = {}
    for result, point in comparison.points:
        key = (result.title, result.method, result.cr)
        best = longest.get(key)
        order = (-point.budget.width, point.budget.length)
        if best is None or order > (-best[0].width, best[0].length):
            longest[key] = (point.budget, point.accuracy)
    return {key: estimate for key, (_, estimate) in longest.items()}
