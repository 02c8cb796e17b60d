"""All measurements of one export, and the flat numbers that other programs read."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dms_train.data.batches import Samples
from dms_train.evaluation.bootstrap import Estimate
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.measure import (
    Agreement,
    Cost,
    EvaluationTarget,
    Exam,
    Replay,
    Solved,
    agreement,
    examine,
    replay,
)
from dms_train.evaluation.options import ValidateOptions
from dms_train.evaluation.problems import read_problems
from dms_train.hf.formats import read_spec
from dms_train.method.base import MethodSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was measured.

    Attributes:
        target: The models.
        agreement: On validation text; None when there was none.
        replay: Of the self-test.
        solved: By `teacher`, `student` and `window_only`; empty without problems.
        sheets: Lines of the problems file that were used.
        problems: Problems on them.
        seconds: The process took until then, training included.
    """

    target: EvaluationTarget
    agreement: Agreement | None
    replay: Replay
    solved: dict[str, Solved]
    sheets: int
    problems: int
    seconds: float

    @property
    def costs(self) -> dict[str, dict[str, Cost]]:
        """By `generation` or `text`, then by `dense`, `student` and `window_only`."""
        found: dict[str, dict[str, Cost]] = {}
        if self.solved:
            names = {"teacher": "dense", "student": "student", "window_only": "window_only"}
            found["generation"] = {names[name]: s.cost for name, s in self.solved.items()}
        if self.agreement is not None:
            found["text"] = {"dense": self.agreement.dense, "student": self.agreement.student}
            if self.agreement.window_only is not None:
                found["text"]["window_only"] = self.agreement.window_only.cost
        return found

    def numbers(self) -> dict[str, float]:
        """Flat metrics. Costs without a prefix are of generation if there was any."""
        found = {"selftest.kl": self.replay.kl, "selftest.limit": self.replay.limit}
        if self.agreement is not None:
            found |= _agreement_numbers(self.agreement, self.target.window)
        for target, (name, both) in enumerate(self.costs.items()):
            found |= _cost_numbers("" if target == 0 else f"{name}.", both)
        for name, result in self.solved.items():
            found |= _interval(f"{name}.accuracy", result.accuracy)
        if self.solved:
            found["problems"] = self.problems
        return {**found, "seconds": self.seconds}


def _interval(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}.low": estimate.low, f"{name}.high": estimate.high}


def _agreement_numbers(found: Agreement, window: int) -> dict[str, float]:
    numbers = {
        **_interval("kl_nats_per_token", found.kl),
        **_interval("top1_agreement", found.top1),
        "lm_nats_per_token.teacher": found.teacher_loss.value,
        "lm_nats_per_token.student": found.student_loss.value,
        "evicted_share.student": found.evicted_share(found.student, window),
    }
    if found.window_only is not None:
        control = found.window_only
        numbers |= {
            **_interval("kl_nats_per_token.window_only", control.kl),
            "lm_nats_per_token.window_only": control.loss.value,
            "evicted_share.window_only": found.evicted_share(control.cost, window),
        }
    return numbers


def _cost_numbers(prefix: str, both: dict[str, Cost]) -> dict[str, float]:
    found: dict[str, float] = {f"{prefix}cr_factor": both["student"].cr_factor}
    for name, cost in both.items():
        found |= {
            f"{prefix}kv_reads.{name}": cost.kv_reads,
            **({f"{prefix}prefill_reads.{name}": cost.prefill_reads} if cost.prefill_reads else {}),
            f"{prefix}peak_tokens.{name}": cost.peak_tokens,
            f"{prefix}cache_bytes.{name}": cost.cache_bytes,
        }
    return found


def validate(
    target: EvaluationTarget,
    samples: Samples | None,
    options: ValidateOptions,
    note: Callable[[str], None],
    since: float,
) -> Findings:
    """Measure everything that the options select.

    Args:
        target: The models.
        samples: Validation text, at least `options.samples`; None to leave it out.
        options: What to measure.
        note: Called with a line after each part.
        since: `time.monotonic()` when the process began its work.

    Raises:
        FileNotFoundError: The problems file or the self-test is absent.
        ValueError: One of them, or a model, cannot be used.
    """
    compared = None
    controlled = options.window_only and target.window > 0  # without a window there is no control
    if samples is not None:
        compared = agreement(target, samples, options.samples, window_only=controlled)
        note(f"{options.samples} sequences: KL {compared.kl} nats/token, top-1 {compared.top1}")
    replayed = replay(target.export, target.device)
    note(f"self-test through the compact cache: KL {replayed.kl:.2e}, limit {replayed.limit:g}")
    sheets, solved = [], {}
    if options.problems is not None:
        sheets = read_problems(Path(options.problems), options.max_problems)
        exam = Exam(
            sheets=sheets,
            pattern=re.compile(options.answer_pattern),
            max_tokens=options.max_tokens,
            max_num_seqs=options.max_num_seqs,
        )
        solved = examine(target, exam, window_only=controlled, note=note)
    return Findings(
        target=target,
        agreement=compared,
        replay=replayed,
        solved=solved,
        sheets=len(sheets),
        problems=sum(len(sheet.answers) for sheet in sheets),
        seconds=time.monotonic() - since,
    )


def export_spec(export: Path) -> MethodSpec:
    """What an export was trained with.

    Raises:
        EvaluationError: It is a dense model.
    """
    spec = read_spec(export)
    if spec is None:
        raise EvaluationError(f"{export}: a dense model; give the folder of a retrofitted export")
    return spec


def require_replay(findings: Findings) -> None:
    """Refuse an export that the compact cache does not reproduce.

    Raises:
        EvaluationError: The self-test failed.
    """
    found = findings.replay
    if not found.passed:
        raise EvaluationError(
            f"{findings.target.export}: self-test failed: KL {found.kl:.4g} nats/token between the "
            f"trained model and the export, at most {found.limit:g} passes; export it again"
        )
