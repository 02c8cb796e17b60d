"""The stage `run_tasks`: measure the final export of a run as `dms-eval` does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dms_train.app import failures, launcher
from dms_train.app.export_evaluation import EXPORT
from dms_train.app.start_point import StartPoint
from dms_train.config.build import ConfigError
from dms_train.config.schema import RunConfig
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.options import EvaluationOptions, TaskStageOptions
from dms_train.evaluation.scaling.run import check, evaluate, prepare
from dms_train.inference.errors import InferenceError
from dms_train.mcore import groups
from dms_train.observe.log import logger

_FOLDER = "evaluation"  # in the run folder, with a folder for each task


def check_tasks(config: RunConfig, start: StartPoint) -> None:
    """Refuse a stage `run_tasks` that cannot be run, before the training.

    Args:
        config: The configuration.
        start: Start of the run; its tokenizer is the export's.

    Raises:
        ConfigError: There is no tokenizer.
        EvaluationError: A task, its documents or a value cannot be used.
        FileNotFoundError: A file of documents is absent.
    """
    if "run_tasks" not in config.stage.run:
        return
    directory = start.tokenizer_dir
    if directory is None:
        raise ConfigError("stage.run: run_tasks needs a tokenizer; set model.tokenizer")
    for options in _runs(config.stage.run_tasks, directory, Path(config.run.dir)):
        try:
            check(options)
        except (EvaluationError, InferenceError) as error:
            raise EvaluationError(f"stage.run_tasks: {error}") from None


def _runs(options: TaskStageOptions, model: Path, folder: Path) -> Iterator[EvaluationOptions]:
    for name in options.tasks:
        yield options.of_task(name, str(model), str(folder / _FOLDER / name))


def evaluate_tasks(options: TaskStageOptions, run: Path) -> dict[str, float]:
    """Measure the final export of a run folder, continuing an interrupted call.

    Args:
        options: Tasks and budgets.
        run: The run folder; results go to `evaluation/TASK` in it.

    Returns:
        `TASK.BUDGET.NAME` for accuracy, KV reads and peak tokens.

    Raises:
        EvaluationError: A task cannot be run, or its folder holds results of other settings.
        FileNotFoundError: There is no export.
    """
    numbers = {}
    for each in _runs(options, run / EXPORT, run):
        result = evaluate(prepare(each), logger().info, launcher.job())
        for point in result.points():
            sys.stdout.write(f"{each.task.name:18} {point}\n")
            name = f"{each.task.name}.{point.budget}"
            numbers[f"{name}.accuracy"] = float(point.accuracy.value)
            numbers[f"{name}.kv_reads"] = point.kv_reads
            numbers[f"{name}.peak_tokens"] = point.peak_tokens
    sys.stdout.flush()
    return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvaluator:
    """The stage `run_tasks` of a run: rank 0 evaluates the final export, the other ranks wait.

    Attributes:
        folder: Run folder.
        options: Tasks and budgets.
    """

    folder: Path
    options: TaskStageOptions

    def evaluate_tasks(self) -> dict[str, float]:
        """Return flat metrics, the same on every rank; every rank calls it.

        Raises:
            EvaluationError: On every rank, when rank 0 was refused something.
        """
        numbers, failure = groups.of_rank_0(self._on_rank_0)
        if failure is not None:
            raise EvaluationError(failure)
        return numbers

    def _on_rank_0(self) -> tuple[dict[str, float], str | None]:
        try:
            return evaluate_tasks(self.options, self.folder), None
        except (ValueError, OSError) as error:  # the other ranks wait for the result
            if not failures.is_expected(error):
                raise
            return {}, failures.message(error)
