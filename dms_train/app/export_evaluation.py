"""Evaluation of an export beside the original model, for runs and jobs."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from dms_train.app.start_point import StartPoint
from dms_train.config.build import ConfigError
from dms_train.config.schema import RunConfig
from dms_train.data.batches import Samples
from dms_train.data.tokens import build_valid_samples
from dms_train.evaluation.devices import resolve_device
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.export_comparison import evaluate_export, evaluation_target
from dms_train.evaluation.options import ValidateOptions
from dms_train.evaluation.problems import check_prompts, read_problems
from dms_train.evaluation.validation import ValidationResult
from dms_train.export.card import add_evaluation
from dms_train.hf.directory import read_architecture, resolve
from dms_train.mcore import groups

EXPORT = Path("exports") / "final" / "hf"  # the export that a run evaluates, in its folder


def check_evaluation(config: RunConfig, start: StartPoint, *, compresses: bool) -> None:
    """Refuse a stage `validate_export` that cannot be run, before the training.

    Args:
        config: The configuration.
        start: Start of the run; its tokenizer is the export's.
        compresses: True if the student will evict tokens when it is exported.

    Raises:
        ConfigError: The export will evict nothing.
        EvaluationError: The problems file or the device cannot be used.
        FileNotFoundError: There is no problems file.
    """
    if "validate_export" not in config.stage.run:
        return
    if not compresses:
        raise ConfigError(
            "stage.run: validate_export needs a student that evicts; run zero_neuron, retrofit or "
            "hold before export, or give a retrofitted one as run.load"
        )
    resolve_device(config.stage.validate_export.device)
    problems, directory = config.stage.validate_export.problems, start.tokenizer_dir
    if problems is not None and directory is not None:
        documents = read_problems(Path(problems), config.stage.validate_export.max_problems)
        check_prompts(documents, directory, start.architecture)


def _evaluate_final(
    run: Path, teacher: Path, samples: Samples | None, options: ValidateOptions, since: float
) -> ValidationResult:
    """Evaluate the final export of a run folder and add the numbers to its model card."""
    target = evaluation_target(run / EXPORT, teacher, options)
    result = evaluate_export(target, samples, options, folder=run, since=since)
    add_evaluation(target.export, result.numbers())
    return result


def evaluate_run(config: RunConfig) -> ValidationResult:
    """Evaluate the final export of a finished run on its validation text, without its ranks.

    Raises:
        ConfigError: The run trained from scratch; there is no original model.
        EvaluationError: As `evaluate_export`.
    """
    since, run, options = time.monotonic(), Path(config.run.dir), config.stage.validate_export
    model = config.model
    if model.path is None:
        raise ConfigError("model.path: not set; there is no original model to compare with")
    teacher = resolve(model.path, revision=model.revision)
    samples = build_valid_samples(
        replace(config.data, micro_batch_size=1, global_batch_size=options.samples),
        vocab_size=read_architecture(teacher).vocab_size,
        seed=config.run.seed,
        cache_dir=config.data.cache_dir or run / "data_cache",
    )
    return _evaluate_final(run, teacher, samples, options, since)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelValidator:
    """The stage `validate_export`: rank 0 evaluates the final export, the other ranks wait.

    Attributes:
        folder: Run folder; the report goes there.
        teacher: Directory of the original; None is refused before the run.
        samples: Validation text of the run.
        options: Measurements.
        since: `time.monotonic()` at the start of the run.
    """

    folder: Path
    teacher: Path | None
    samples: Samples | None
    options: ValidateOptions
    since: float

    def validate(self) -> dict[str, float]:
        """Return flat metrics, the same on every rank; every rank calls it.

        Raises:
            EvaluationError: On every rank, when rank 0 refused an input or the self-test failed.
        """
        numbers, failure = groups.of_rank_0(self._on_rank_0)
        if failure is not None:
            raise EvaluationError(failure)
        return numbers

    def _on_rank_0(self) -> tuple[dict[str, float], str | None]:
        assert self.teacher is not None
        try:
            result = _evaluate_final(
                self.folder, self.teacher, self.samples, self.options, self.since
            )
        except EvaluationError as error:  # the other ranks wait for the result
            return {}, str(error)
        return result.numbers(), None
