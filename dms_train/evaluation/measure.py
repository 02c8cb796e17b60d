"""Measurements of an export and its teacher: agreement, cost and self-test.

Both run through the inference engine, the export with the compact cache and the teacher with the
dense cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dms_train.data.batches import Sample, Samples
from dms_train.evaluation.bootstrap import Estimate, ratio
from dms_train.evaluation.options import COMPARED_POSITIONS
from dms_train.evaluation.reading import READ_CHUNK, texts_at_once
from dms_train.hf.directory import read_architecture
from dms_train.hf.selftest import SelfTest
from dms_train.inference.accounting import RequestKV, TotalKV
from dms_train.inference.llm import LLM
from dms_train.inference.outputs import RequestOutput
from dms_train.method.base import MethodSpec
from dms_train.method.losses import kl_teacher_student


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTarget:
    """Export and teacher, and their device.

    Attributes:
        export: Directory of the export.
        teacher: Directory of the original.
        spec: Method that the export was trained with.
        device: torch device.
        memory: Fields of `EngineOptions` that limit the memory of a compact cache.
    """

    export: Path
    teacher: Path
    spec: MethodSpec
    device: str
    memory: Mapping[str, Any] = field(default_factory=dict)

    @property
    def window(self) -> int:
        """Window of the export and of the control."""
        return self.spec.window


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of the cache of one model.

    Attributes:
        cr_factor: Tokens seen over mean tokens held, at the last token of each sequence.
        kv_reads: Slots attended by a sequence, mean over KV heads. The sum covers the decoding
            steps of a generated answer, or all queries of a text that is only read.
        prefill_reads: Slots attended by the prompt of an answer; 0 for a text.
        peak_tokens: Largest number of tokens that a sequence held, mean over KV heads and
            sequences.
        cache_bytes: Largest number of bytes of the cache slots that a sequence reserved.
        cr_factors: float64 [layers, kv_heads], of the layers without a sliding window.
        layers: Numbers of these layers in the model, from 0.
    """

    cr_factor: float
    kv_reads: float
    prefill_reads: float
    peak_tokens: float
    cache_bytes: int
    cr_factors: Tensor
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Export and teacher on the same text.

    Attributes:
        kl: KL(teacher || export), nats per token.
        top1: Share of positions with the same most likely token.
        teacher_loss: Next-token loss of the teacher, nats per token.
        student_loss: Next-token loss of the export, nats per token.
        lengths: Tokens of each text.
        dense: Cost of the teacher's cache.
        student: Cost of the export's cache.
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
        """Return evicted tokens over tokens that have left the window, at the end of a text."""
        seen = sum(self.lengths)
        left = sum(max(length - window - 1, 0) for length in self.lengths)
        return (seen - seen / cost.cr_factor) / left if left > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOnly:
    """The control: the teacher's weights, every token evicted when it leaves the window.

    Attributes:
        kl: KL(teacher || control), nats per token.
        loss: Next-token loss of the control, nats per token.
        cost: Cost of its cache.
    """

    kl: Estimate
    loss: Estimate
    cost: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestResult:
    """Result of the self-test of the export, computed through the compact cache.

    Attributes:
        kl: KL(recorded || computed), nats per token.
        limit: Largest KL that passes.
    """

    kl: float
    limit: float

    @property
    def passed(self) -> bool:
        """True if the limit holds; not-a-number fails."""
        return self.kl <= self.limit


class _Reading(NamedTuple):
    """Hidden states of texts, and the weight that maps them to logits.

    Attributes:
        hidden: Last hidden states of each text, [tokens, hidden], on the host.
        head: Weight of the output layer, [vocab, hidden].
        cost: Cost of its cache.
    """

    hidden: list[Tensor]
    head: Tensor
    cost: Cost


def agreement(
    target: EvaluationTarget, samples: Samples, count: int, *, window_only: bool = False
) -> Agreement:
    """Score the first `count` samples with the models, token by token through their caches.

    One model is loaded at a time. Only the hidden states of the texts stay, because the logits of
    all texts would take more memory than the models.

    Args:
        target: Export and teacher.
        samples: The text; of packed samples each document is a text of its own.
        count: Number of samples to take.
        window_only: Also score the control.
    """
    texts = [text for number in range(count) for text in samples[number].documents()]
    teacher = _read(target.teacher, texts, target.device, cache="dense")
    student = _read(target.export, texts, target.device, **target.memory)
    control = None
    if window_only:
        how: dict[str, Any] = {"policy": "window", "policy_options": {"window": target.window}}
        control = _read(target.teacher, texts, target.device, **target.memory, **how)
    kl, top1, teacher_nll, student_nll, tokens = _scores(student, teacher, texts, target.device)
    return Agreement(
        kl=ratio(kl, tokens),
        top1=ratio(top1, tokens),
        teacher_loss=ratio(teacher_nll, tokens),
        student_loss=ratio(student_nll, tokens),
        lengths=tuple(len(text.tokens) for text in texts),
        dense=teacher.cost,
        student=student.cost,
        window_only=None if control is None else _control(control, teacher, texts, target.device),
    )


def _read(directory: Path, texts: list[Sample], device: str, **how: Any) -> _Reading:
    """Load a model, read the texts, and free it; `how` are engine options."""
    longest = max(len(text.tokens) for text in texts)
    at_once = texts_at_once(read_architecture(directory), len(texts), longest)
    llm = LLM(directory, prefill_chunk=READ_CHUNK, max_num_seqs=at_once, device=device, **how)
    read = llm.engine.hidden_states([text.tokens.tolist() for text in texts])
    cost = _text_cost(llm, [text.kv for text in read])
    return _Reading([text.hidden for text in read], llm.engine.head.cpu(), cost)


def _control(control: _Reading, teacher: _Reading, texts: list[Sample], device: str) -> WindowOnly:
    kl, _, _, loss, tokens = _scores(control, teacher, texts, device)
    return WindowOnly(kl=ratio(kl, tokens), loss=ratio(loss, tokens), cost=control.cost)


def _scores(
    student: _Reading, teacher: _Reading, texts: list[Sample], device: str
) -> list[list[float]]:
    """Return the columns of `_compared`, with a row for each text."""
    heads = student.head.to(device), teacher.head.to(device)
    rows = []
    for text, *hidden in zip(texts, student.hidden, teacher.hidden, strict=True):
        columns = (*hidden, text.labels, text.loss_mask.double())
        column_sums = torch.zeros(5, dtype=torch.float64, device=device)
        for first in range(0, len(text.tokens), COMPARED_POSITIONS):
            chunk = [column[first : first + COMPARED_POSITIONS].to(device) for column in columns]
            ours, theirs = (F.linear(chunk[i], heads[i]).double() for i in range(2))
            column_sums += _compared(ours, theirs, chunk[2], chunk[3])
        rows.append(column_sums.tolist())
    return [list(column) for column in zip(*rows, strict=True)]


def _compared(student: Tensor, teacher: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Return KL, equal argmax, both next-token losses and tokens, summed where `counts` is 1."""
    losses = [
        kl_teacher_student(student, teacher),
        (student.argmax(-1) == teacher.argmax(-1)).double(),
        *(-x.log_softmax(-1).gather(1, labels[:, None])[:, 0] for x in (teacher, student)),
        torch.ones_like(counts),
    ]
    return torch.stack([(loss * counts).sum() for loss in losses])


def _text_cost(llm: LLM, texts: list[RequestKV]) -> Cost:
    """Return the cost of reading texts; every token is a prompt token."""
    total = llm.kv
    assert total is not None
    peak_tokens = max(text.peak_live_tokens for text in texts)
    return _cost(total, total.prefill_reads, 0.0, peak_tokens, texts)


def answer_cost(llm: LLM, outputs: list[RequestOutput]) -> Cost:
    """Return the cost of answers that were generated."""
    total = llm.kv
    assert total is not None
    answers = [output.kv for output in outputs]
    peak_tokens = sum(answer.peak_live_tokens for answer in answers) / len(answers)
    return _cost(total, total.kv_reads, total.prefill_reads, peak_tokens, answers)


def _cost(
    total: TotalKV,
    kv_reads: float,
    prefill_reads: float,
    peak_tokens: float,
    sequences: list[RequestKV],
) -> Cost:
    return Cost(
        cr_factor=total.cr_factor,
        kv_reads=kv_reads / total.requests,
        prefill_reads=prefill_reads / total.requests,
        peak_tokens=peak_tokens,
        cache_bytes=max(sequence.peak_allocated_bytes for sequence in sequences),
        cr_factors=total.cr_factors,
        layers=total.layers,
    )


def run_selftest(export: Path, device: str, **memory: Any) -> SelfTestResult:
    """Compare the recorded output of the trained model with the output of the compact cache.

    Args:
        export: Directory of the export.
        device: torch device.
        memory: As `EvaluationTarget.memory`.

    Raises:
        FileNotFoundError: The export has no self-test.
        ValueError: The self-test is damaged.
    """
    reference = SelfTest.load(export)
    how: dict[str, Any] = {
        "dtype": reference.dtype,
        "device": device,
        "prefill_chunk": READ_CHUNK,
        **memory,
    }
    llm = LLM(export, max_num_seqs=1, **how)
    logits = llm.logits(reference.input_ids.tolist()).cpu()
    recorded, computed = reference.logits.double(), logits.double()
    kl = kl_teacher_student(computed, recorded).mean().item()
    return SelfTestResult(kl=kl, limit=reference.kl_tolerance)
