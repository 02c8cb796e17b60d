"""Measurements of an export and its teacher: agreement, cost, replay, solved problems.

Both run through the inference engine: the export with the compact cache, the teacher with the dense
one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dms_train.data.batches import Samples
from dms_train.evaluation.bootstrap import Estimate, ratio
from dms_train.evaluation.problems import Sheet, solved
from dms_train.hf.selftest import SelfTest
from dms_train.inference.accounting import TotalKV
from dms_train.inference.llm import LLM
from dms_train.inference.options import SamplingParams
from dms_train.inference.outputs import RequestOutput
from dms_train.method.base import MethodSpec
from dms_train.method.losses import kl_teacher_student

_CHUNK = 64  # tokens between which the compact cache really frees what is evicted
_POSITIONS = 512  # compared at a time: two rows of the vocabulary in float64 each


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTarget:
    """The two models and where they run.

    Attributes:
        export: Directory of the export.
        teacher: Directory of the original.
        spec: What the export was trained with.
        device: torch device.
    """

    export: Path
    teacher: Path
    spec: MethodSpec
    device: str

    @property
    def window(self) -> int:
        """Of the export, and of the control."""
        return self.spec.window


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the cache of one model cost.

    Attributes:
        cr_factor: Tokens seen over mean tokens held, at the last token of each sequence.
        kv_reads: Slots attended by a sequence, mean over KV heads: summed over the decoding steps
            of a generated answer, or over all queries of a text that is only read.
        prefill_reads: Slots attended by the prompt of an answer; 0 for a text.
        peak_tokens: Most tokens that a sequence held at a time, mean over KV heads and sequences.
        cache_bytes: Most bytes that were taken from the system.
        cr_factors: float64 [layers, kv_heads].
    """

    cr_factor: float
    kv_reads: float
    prefill_reads: float
    peak_tokens: float
    cache_bytes: int
    cr_factors: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Export and teacher on the same text.

    Attributes:
        kl: KL(teacher || export), nats per token.
        top1: Share of positions with the same most likely token.
        teacher_loss: Next-token loss of the teacher, nats per token.
        student_loss: Of the export.
        lengths: Tokens of each text.
        dense: What the teacher's cache cost.
        student: What the export's cost.
        window_only: The teacher with only its window; None when left out.
    """

    kl: Estimate
    top1: Estimate
    teacher_loss: Estimate
    student_loss: Estimate
    lengths: tuple[int, ...]
    dense: Cost
    student: Cost
    window_only: WindowOnly | None = None

    def evicted_share(self, cost: Cost, window: int) -> float:
        """Evicted tokens over tokens that have left the window, at the end of a text."""
        seen = sum(self.lengths)
        left = sum(max(length - window - 1, 0) for length in self.lengths)
        return (seen - seen / cost.cr_factor) / left if left > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOnly:
    """The control: the teacher's weights, every token evicted when it leaves the window.

    Attributes:
        kl: KL(teacher || control), nats per token.
        loss: Its next-token loss, nats per token.
        cost: What its cache cost.
    """

    kl: Estimate
    loss: Estimate
    cost: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """One model on the problems."""

    accuracy: Estimate
    cost: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The self-test of the export, computed through the compact cache.

    Attributes:
        kl: KL(recorded || computed), nats per token.
        limit: Largest that passes.
    """

    kl: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the limit holds; not-a-number fails."""
        return self.kl <= self.limit


def agreement(
    target: EvaluationTarget, samples: Samples, count: int, *, window_only: bool = False
) -> Agreement:
    """Score the first `count` samples with the models, token by token through their caches.

    Args:
        target: Export and teacher.
        samples: The text; of packed samples each document is a text of its own.
        count: Samples to take.
        window_only: Whether the control is scored too.
    """
    slab: dict[str, Any] = {"max_num_seqs": 1, "slab_pages": 8, "device": target.device}
    student = LLM(target.export, prefill_chunk=_CHUNK, **slab)
    teacher = LLM(target.teacher, cache="dense", prefill_chunk=_CHUNK, **slab)
    models = [student]
    if window_only:
        how: dict[str, Any] = {"policy": "window", "prefill_chunk": _CHUNK}
        how["policy_options"] = {"window": target.window}
        models.append(LLM(target.teacher, **how, **slab))
    rows: list[list[list[float]]] = [[] for _ in models]
    texts = [text for number in range(count) for text in samples[number].documents()]
    for sample in texts:
        ids, counts = sample.tokens.tolist(), sample.loss_mask.double()
        original = teacher.logits(ids).cpu()
        for model, scores in zip(models, rows, strict=True):
            scores.append(_compared(model.logits(ids).cpu(), original, sample.labels, counts))
    kl, top1, teacher_nll, student_nll, tokens = _columns(rows[0])
    return Agreement(
        kl=ratio(kl, tokens),
        top1=ratio(top1, tokens),
        teacher_loss=ratio(teacher_nll, tokens),
        student_loss=ratio(student_nll, tokens),
        lengths=tuple(len(text.tokens) for text in texts),
        dense=_text_cost(teacher),
        student=_text_cost(student),
        window_only=_control(rows[1], models[1]) if window_only else None,
    )


def _control(rows: list[list[float]], llm: LLM) -> WindowOnly:
    kl, _, _, loss, tokens = _columns(rows)
    return WindowOnly(kl=ratio(kl, tokens), loss=ratio(loss, tokens), cost=_text_cost(llm))


def _columns(rows: list[list[float]]) -> list[list[float]]:
    columns: list[list[float]] = torch.tensor(rows, dtype=torch.float64).T.tolist()
    return columns


def _compared(student: Tensor, teacher: Tensor, labels: Tensor, counts: Tensor) -> list[float]:
    """KL, equal argmax, both next-token losses and tokens, summed where `counts` is 1."""
    sums = torch.zeros(4, dtype=torch.float64)
    for s, t, label, count in zip(
        *(torch.split(x, _POSITIONS) for x in (student, teacher, labels, counts)), strict=True
    ):
        wide, original = s.double(), t.double()
        losses = [
            kl_teacher_student(wide, original),
            (wide.argmax(-1) == original.argmax(-1)).double(),
            *(-x.log_softmax(-1).gather(1, label[:, None])[:, 0] for x in (original, wide)),
        ]
        sums += torch.stack([(loss * count).sum() for loss in losses])
    return [*sums.tolist(), counts.sum().item()]


def _text_cost(llm: LLM) -> Cost:
    """Of texts that were read, one after the other; every token of them was a query of a prompt."""
    total = llm.kv
    assert total is not None
    return _cost(total, total.prefill_reads, 0.0, total.peak_live_tokens)


def _answer_cost(llm: LLM, outputs: list[RequestOutput]) -> Cost:
    """Of answers that were generated."""
    total = llm.kv
    assert total is not None
    peaks = sum(output.kv.peak_live_tokens for output in outputs) / len(outputs)
    return _cost(total, total.kv_reads, total.prefill_reads, peaks)


def _cost(total: TotalKV, kv_reads: float, prefill_reads: float, peak_tokens: float) -> Cost:
    return Cost(
        cr_factor=total.cr_factor,
        kv_reads=kv_reads / total.requests,
        prefill_reads=prefill_reads / total.requests,
        peak_tokens=peak_tokens,
        cache_bytes=total.peak_allocated_bytes,
        cr_factors=total.cr_factors,
    )


def replay(export: Path, device: str) -> Replay:
    """Compare what the export records of the trained model with what the compact cache computes.

    Raises:
        FileNotFoundError: The export has no self-test.
        ValueError: It is broken.
    """
    reference = SelfTest.load(export)
    llm = LLM(export, dtype=reference.dtype, device=device, max_num_seqs=1, prefill_chunk=_CHUNK)
    found = llm.logits(reference.input_ids.tolist()).cpu()
    recorded, computed = reference.logits.double(), found.double()
    kl = kl_teacher_student(computed, recorded).mean().item()
    return Replay(kl=kl, limit=reference.kl_tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """Problems and how they are put.

    Attributes:
        sheets: The problems.
        pattern: Finds the answers in a continuation.
        max_tokens: Most tokens of one.
        max_num_seqs: Sheets solved at the same time.
    """

    sheets: list[Sheet]
    pattern: re.Pattern[str]
    max_tokens: int
    max_num_seqs: int


def examine(
    target: EvaluationTarget, exam: Exam, *, window_only: bool, note: Callable[[str], None]
) -> dict[str, Solved]:
    """Greedy answers of teacher, export and, if selected, the teacher with its window only."""
    models: dict[str, tuple[Path, dict[str, Any]]] = {
        "teacher": (target.teacher, {"cache": "dense"}),
        "student": (target.export, {}),
    }
    if window_only:
        how = {"policy": "window", "policy_options": {"window": target.window}}
        models["window_only"] = (target.teacher, how)
    found = {}
    for name, (directory, how) in models.items():
        found[name] = solve(directory, exam, {"device": target.device, **how})
        note(f"{name}: accuracy {found[name].accuracy}")
    return found


def greedy(sheet: Sheet, max_tokens: int) -> SamplingParams:
    """The most likely continuation of a sheet, up to its stop text."""
    stop = () if sheet.stop is None else (sheet.stop,)
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=stop)


def solve(directory: Path, exam: Exam, how: dict[str, Any]) -> Solved:
    """Greedy answers of one model; `how` are fields of `EngineOptions`."""
    rows = exam.max_num_seqs
    # fine enough that slabs do not blur the comparison, few enough to be read in one go each
    slab_pages = min(256, max(8, 2 * rows))
    llm = LLM(directory, max_num_seqs=rows, slab_pages=slab_pages, **how)
    params = [greedy(sheet, exam.max_tokens) for sheet in exam.sheets]
    outputs = llm.generate([sheet.prompt for sheet in exam.sheets], params)
    hits = [
        float(solved(output.outputs[0].text, sheet.answers, exam.pattern))
        for output, sheet in zip(outputs, exam.sheets, strict=True)
    ]
    return Solved(
        accuracy=ratio(hits, [float(len(sheet.answers)) for sheet in exam.sheets]),
        cost=_answer_cost(llm, outputs),
    )
