"""All measurements of one export, and the flat numbers that other programs read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dms_train.data.batches import Samples
from dms_train.evaluation.bootstrap import Estimate
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.measure import (
    Agreement,
    Cost,
    EvaluationTarget,
    SelfTestResult,
    agreement,
    run_selftest,
)
from dms_train.evaluation.options import ValidateOptions
from dms_train.evaluation.problems import Accuracy, ProblemSet, evaluate_accuracy, read_problems
from dms_train.evaluation.scorers.sheet import SheetScorer
from dms_train.hf.formats import read_spec
from dms_train.method.base import MethodSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """Measurements of one export and its teacher.

    Attributes:
        target: The models.
        agreement: Agreement on validation text; None without text.
        selftest: Result of the export's self-test.
        accuracies: Accuracy of `teacher`, `student` and `window_only`; empty without problems.
        num_sheets: Number of sheets that were answered.
        num_problems: Number of problems on these sheets.
        seconds: Duration of the process, training included.
    """

    target: EvaluationTarget
    agreement: Agreement | None
    selftest: SelfTestResult
    accuracies: dict[str, Accuracy]
    num_sheets: int
    num_problems: int
    seconds: float

    @property
    def costs(self) -> dict[str, dict[str, Cost]]:
        """Costs by `generation` or `text`, then by `dense`, `student` and `window_only`."""
        costs: dict[str, dict[str, Cost]] = {}
        if self.accuracies:
            names = {"teacher": "dense", "student": "student", "window_only": "window_only"}
            costs["generation"] = {names[name]: a.cost for name, a in self.accuracies.items()}
        if self.agreement is not None:
            costs["text"] = {"dense": self.agreement.dense, "student": self.agreement.student}
            if self.agreement.window_only is not None:
                costs["text"]["window_only"] = self.agreement.window_only.cost
        return costs

    def numbers(self) -> dict[str, float]:
        """Return flat metrics. Costs without a prefix belong to generation, if any ran."""
        numbers = {"selftest.kl": self.selftest.kl, "selftest.limit": self.selftest.limit}
        if self.agreement is not None:
            numbers |= _agreement_numbers(self.agreement, self.target.window)
        for index, (name, costs) in enumerate(self.costs.items()):
            numbers |= _cost_numbers("" if index == 0 else f"{name}.", costs)
        for name, accuracy in self.accuracies.items():
            numbers |= _interval(f"{name}.accuracy", accuracy.share)
        if self.accuracies:
            numbers["problems"] = self.num_problems
        return {**numbers, "seconds": self.seconds}


def _interval(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}.low": estimate.low, f"{name}.high": estimate.high}


def _agreement_numbers(agreement: Agreement, window: int) -> dict[str, float]:
    numbers = {
        **_interval("kl_nats_per_token", agreement.kl),
        **_interval("top1_agreement", agreement.top1),
        "lm_nats_per_token.teacher": agreement.teacher_loss.value,
        "lm_nats_per_token.student": agreement.student_loss.value,
        "evicted_share.student": agreement.evicted_share(agreement.student, window),
    }
    if agreement.window_only is not None:
        control = agreement.window_only
        numbers |= {
            **_interval("kl_nats_per_token.window_only", control.kl),
            "lm_nats_per_token.window_only": control.loss.value,
            "evicted_share.window_only": agreement.evicted_share(control.cost, window),
        }
    return numbers


def _cost_numbers(prefix: str, both: dict[str, Cost]) -> dict[str, float]:
    numbers: dict[str, float] = {f"{prefix}cr_factor": both["student"].cr_factor}
    for name, cost in both.items():
        numbers |= {
            f"{prefix}kv_reads.{name}": cost.kv_reads,
            **({f"{prefix}prefill_reads.{name}": cost.prefill_reads} if cost.prefill_reads else {}),
            f"{prefix}peak_tokens.{name}": cost.peak_tokens,
            f"{prefix}cache_bytes.{name}": cost.cache_bytes,
        }
    return numbers


def validate(
    target: EvaluationTarget,
    samples: Samples | None,
    options: ValidateOptions,
    note: Callable[[str], None],
    since: float,
) -> ValidationResult:
    """Measure everything that the options select.

    Args:
        target: The models.
        samples: Validation text, at least `options.samples` samples; None to leave it out.
        options: Selection of measurements.
        note: Called with a line after each part.
        since: `time.monotonic()` when the process began its work.

    Raises:
        FileNotFoundError: The problems file or the self-test is absent.
        ValueError: The problems, the self-test or a model cannot be used.
    """
    compared = None
    controlled = options.window_only and target.window > 0  # without a window there is no control
    if samples is not None:
        compared = agreement(target, samples, options.samples, window_only=controlled)
        note(f"{options.samples} sequences: KL {compared.kl} nats/token, top-1 {compared.top1}")
    selftest = run_selftest(target.export, target.device, **target.memory)
    note(f"self-test through the compact cache: KL {selftest.kl:.2e}, limit {selftest.limit:g}")
    documents, accuracies = [], {}
    if options.problems is not None:
        documents = read_problems(Path(options.problems), options.max_problems)
        problems = ProblemSet(
            documents=documents,
            scorer=SheetScorer(options.answer_pattern),
            max_tokens=options.max_tokens,
            max_num_seqs=options.max_num_seqs,
        )
        accuracies = compare_accuracy(target, problems, window_only=controlled, note=note)
    return ValidationResult(
        target=target,
        agreement=compared,
        selftest=selftest,
        accuracies=accuracies,
        num_sheets=len(documents),
        num_problems=sum(len(document.gold) for document in documents),
        seconds=time.monotonic() - since,
    )


def compare_accuracy(
    target: EvaluationTarget,
    problems: ProblemSet,
    *,
    window_only: bool,
    note: Callable[[str], None],
) -> dict[str, Accuracy]:
    """Answer problems with the teacher, the export and optionally the teacher's window alone.

    Args:
        target: The models.
        problems: The problems.
        window_only: Measure the control too: the teacher with only its window.
        note: Called with a line after each model.
    """
    models: dict[str, tuple[Path, dict[str, Any]]] = {
        "teacher": (target.teacher, {"cache": "dense"}),
        "student": (target.export, {**target.memory}),
    }
    if window_only:
        policy = {"policy": "window", "policy_options": {"window": target.window}}
        models["window_only"] = (target.teacher, {**target.memory, **policy})
    accuracies = {}
    for name, (directory, options) in models.items():
        accuracies[name] = evaluate_accuracy(
            directory, problems, {"device": target.device, **options}
        )
        note(f"{name}: accuracy {accuracies[name].share}")
    return accuracies


def export_spec(export: Path) -> MethodSpec:
    """Return the method that an export was trained with.

    Raises:
        EvaluationError: The export is a dense model.
    """
    spec = read_spec(export)
    if spec is None:
        raise EvaluationError(f"{export}: a dense model; give the folder of a retrofitted export")
    return spec


def require_selftest(result: ValidationResult) -> None:
    """Fail if the compact cache does not reproduce the export.

    Raises:
        EvaluationError: The self-test failed.
    """
    selftest = result.selftest
    if not selftest.passed:
        raise EvaluationError(
            f"{result.target.export}: self-test failed: KL {selftest.kl:.4g} nats/token between "
            f"the trained model and the export, at most {selftest.limit:g} passes; export it again"
        )
