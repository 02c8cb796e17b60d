"""Comparison of an export with the original model, and its report.

Nothing here needs the packages of the training.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dms_train.data.batches import Samples
from dms_train.evaluation import report
from dms_train.evaluation.devices import require_memory, resolve_device
from dms_train.evaluation.measure import EvaluationTarget
from dms_train.evaluation.options import ValidateOptions
from dms_train.evaluation.problems import check_prompts, read_problems
from dms_train.evaluation.validation import (
    ValidationResult,
    export_spec,
    require_selftest,
    validate,
)
from dms_train.hf.directory import read_architecture
from dms_train.observe.log import logger
from dms_train.observe.sinks import METRICS_FILE


def evaluation_target(export: Path, teacher: Path, options: ValidateOptions) -> EvaluationTarget:
    """Return the two models of an evaluation, after checks that load no weights.

    Args:
        export: Directory of the export.
        teacher: Directory of the original model.
        options: Measurements and device.

    Raises:
        EvaluationError: No export, no such device, too little memory on it, or problems that do not
            fit the models.
        FileNotFoundError: A model or the problems file is absent.
    """
    target = EvaluationTarget(
        export=export,
        teacher=teacher,
        spec=export_spec(export),
        device=resolve_device(options.device),
        memory={
            "cache_bytes": options.cache_bytes,
            "gpu_memory_utilization": options.gpu_memory_utilization,
        },
    )
    for model in (teacher, export):
        require_memory(model, target.device)
    architecture = read_architecture(teacher)
    if options.problems is not None:
        documents = read_problems(Path(options.problems), options.max_problems)
        check_prompts(documents, export, architecture)
    return target


def evaluate_export(
    target: EvaluationTarget,
    samples: Samples | None,
    options: ValidateOptions,
    *,
    folder: Path,
    since: float,
) -> ValidationResult:
    """Measure an export, write the report to `folder` and print its tables.

    Args:
        target: From `evaluation_target`.
        samples: Validation text, at least `options.samples` samples; None to leave it out.
        options: Measurements.
        folder: Receives `metrics.json`, `report.md` and pictures. Where it is a run folder, the
            curves of the training are drawn too.
        since: `time.monotonic()` when the process began.

    Raises:
        EvaluationError: The self-test failed; the report is written before.
        FileNotFoundError: The export has no self-test.
        ValueError: A model is damaged.
    """
    result = validate(target, samples, options, logger().info, since)
    for line in report.write(result, folder, folder / METRICS_FILE):
        logger().warning(line)
    sys.stdout.write(f"{report.tables(result)}\n")
    sys.stdout.flush()
    require_selftest(result)
    return result
