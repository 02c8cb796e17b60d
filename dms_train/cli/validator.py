"""Judges the final export of a run on rank 0, while the other ranks wait."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from dms_train.cli.start_point import StartPoint
from dms_train.config.build import ConfigError
from dms_train.config.schema import RunConfig
from dms_train.data.batches import Samples
from dms_train.evaluation import report
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.findings import Findings, export_window, require_replay, validate
from dms_train.evaluation.measure import Place
from dms_train.evaluation.options import ValidateOptions
from dms_train.evaluation.problems import check_prompts, read_problems
from dms_train.mcore import groups
from dms_train.observe.log import logger
from dms_train.observe.sinks import METRICS_FILE


def check_validation(config: RunConfig, start: StartPoint, *, compresses: bool) -> None:
    """Refuse a validation that cannot be made, before the training.

    Args:
        config: The configuration.
        start: Where the run starts; its tokenizer is the export's.
        compresses: Whether the student will have decisions when it is exported.

    Raises:
        ConfigError: There will be no decisions.
        EvaluationError: The problems file or the device cannot be used.
        FileNotFoundError: There is none.
    """
    if "validate" not in config.stage.run:
        return
    if not compresses:
        raise ConfigError(
            "stage.run: validate needs a student that evicts; run zero_neuron, retrofit or hold "
            "before export, or give a retrofitted one as run.load"
        )
    resolve_device(config.stage.validate.device)
    problems, directory = config.stage.validate.problems, start.tokenizer_dir
    if problems is not None and directory is not None:
        sheets = read_problems(Path(problems), config.stage.validate.max_problems)
        check_prompts(sheets, directory, start.architecture)


def resolve_device(device: str) -> str:
    """`stage.validate.device` as torch understands it; EvaluationError without a GPU."""
    present = torch.cuda.is_available()
    if device == "cuda" and not present:
        raise EvaluationError("device=cuda: this machine has no GPU; use auto or cpu")
    if device == "auto":
        return "cuda" if present else "cpu"
    return device


def judge(
    place: Place,
    samples: Samples | None,
    options: ValidateOptions,
    folder: Path,
    since: float,
    rows: Path | None = None,
) -> Findings:
    """Measure, write the files to `folder` and print the tables."""
    found = validate(place, samples, options, logger().info, since)
    for line in report.write(found, folder, rows):
        logger().warning(line)
    sys.stdout.write(f"{report.tables(found)}\n")
    sys.stdout.flush()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelValidator:
    """Compares `exports/final/hf` of a run folder with the original.

    Attributes:
        folder: Run folder; the report goes there.
        teacher: Directory of the original; None is refused before the run.
        samples: Validation text of the run.
        options: What to measure.
        since: `time.monotonic()` at the start of the run.
    """

    folder: Path
    teacher: Path | None
    samples: Samples | None
    options: ValidateOptions
    since: float

    def validate(self) -> dict[str, float]:
        """Measure on rank 0; every rank calls it and fails if the self-test does.

        Raises:
            EvaluationError: The self-test failed; the report is written.
            ValueError: Of a room that refused its input, on rank 0.
        """
        numbers, failure = groups.of_rank_0(self._on_rank_0)
        if failure is not None:
            raise EvaluationError(failure)
        return dict(numbers)

    def _on_rank_0(self) -> tuple[dict[str, float], str | None]:
        """Flat numbers and what the self-test says."""
        assert self.teacher is not None
        export = self.folder / "exports" / "final" / "hf"
        device = resolve_device(self.options.device)
        place = Place(
            export=export, teacher=self.teacher, window=export_window(export), device=device
        )
        rows = self.folder / METRICS_FILE
        found = judge(place, self.samples, self.options, self.folder, self.since, rows)
        try:
            require_replay(found)
        except EvaluationError as error:
            return found.numbers(), str(error)
        return found.numbers(), None
