"""Preparation of a shard of conversations from rows: choose, verify, render, write.

Every step is a generator over `Sample`s in the order of their rows. Memory therefore does not grow
with the data, and the documents depend neither on the number of workers nor on interruptions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dms_train.data.manifest import Manifest, file_sha256
from dms_train.data.origins import UNKNOWN_TERMS, Terms
from dms_train.data.writer import package_versions
from dms_train.data_prep.conversations import (
    ChatOptions,
    ConversationEncoder,
    LossOn,
    MaskedTokens,
)
from dms_train.data_prep.encode import encode_in_order
from dms_train.data_prep.journal import Journal
from dms_train.data_prep.overlap import EvaluationSets
from dms_train.data_prep.progress import progress_bar
from dms_train.data_prep.rows import Row, Rows, Shard
from dms_train.data_prep.samples import Outcome, Sample
from dms_train.data_prep.shard_files import PreparedShard, shard_prefix, write_shard
from dms_train.evaluation.answers import Verdict
from dms_train.evaluation.verification import Verifier

_PACKAGES = ("math-verify", "latex2sympy2_extended", "sympy", "tokenizers", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Rule that chooses which traces of a row become documents.

    Attributes:
        every_trace: Choose all traces that are correct and fit; otherwise only the first.
        min_tokens: Length of the shortest document.
        max_tokens: Length of the longest document; None for any length.
    """

    every_trace: bool = False
    min_tokens: int = 1
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationJob:
    """One shard to make.

    Attributes:
        command: Name of the command, for the manifest.
        output: Prefix of the files to write.
        rows: Source of the rows.
        sample_of: Makes a sample of a row.
        settings: Settings of `sample_of`, for the manifest.
        chat: Conversion of a conversation to tokens.
        choice: Choice of the conversations that become documents.
        evaluation_sets: Files whose problems must not be trained on.
        shard: Part of the rows to read.
        verify: True to verify traces.
        terms: Source and licence of the rows.
        workers: Number of processes for verification, and for tokenisation.
        overwrite: Replace an existing shard or unfinished work with other settings.
    """

    command: str
    output: Path
    rows: Rows
    sample_of: Callable[[Row], Sample]
    settings: dict[str, Any]
    chat: ChatOptions
    choice: Choice = field(default_factory=Choice)
    evaluation_sets: tuple[Path, ...] = ()
    shard: Shard = field(default_factory=Shard)
    verify: bool = False
    terms: Terms = UNKNOWN_TERMS
    workers: int = 1
    overwrite: bool = False


def make_shard(job: ConversationJob) -> Manifest:
    """Make one shard, or continue an interrupted call.

    A shard that exists with the same settings is left as it is.

    Raises:
        DataError: An input is unfit, nothing is kept, or the output cannot be written.
        EvaluationError: Verification is asked for and math-verify is missing.
    """
    encoder = ConversationEncoder(job.chat)
    sets = EvaluationSets(job.evaluation_sets)
    shard = PreparedShard(
        prefix=shard_prefix(job.output, job.shard),
        sources=job.rows.sources,
        settings=_settings(job, encoder, sets),
        vocab_size=encoder.vocab_size,
        eod_id=encoder.eod_id,
        loss_mask=job.chat.loss_on is not LossOn.ALL,
        counted=("traces", "overlaps"),
        terms=job.terms,
        overwrite=job.overwrite,
    )
    return write_shard(shard, lambda journal: _fill(journal, job, encoder, sets))


def _settings(
    job: ConversationJob, encoder: ConversationEncoder, sets: EvaluationSets
) -> dict[str, Any]:
    """Return all settings that affect the documents."""
    settings = {
        "command": job.command,
        **job.settings,
        "choice": asdict(job.choice),
        "sources": [[source.name, source.sha256] for source in job.rows.sources],
        "shard": [job.shard.index, job.shard.count],
        "evaluation_sets": sets.sets,
        "tokenizer": Path(job.chat.tokenizer).resolve().name,
        "tokenizer_sha256": file_sha256(Path(job.chat.tokenizer) / "tokenizer.json"),
        "chat_template": encoder.template,
        "template_variables": dict(job.chat.variables),
        "loss_on": job.chat.loss_on.value,
        "append_eod": job.chat.append_eod,
        "versions": package_versions(_PACKAGES),
    }
    stored: dict[str, Any] = json.loads(json.dumps(settings))  # equal to values of a manifest
    return stored


class _Documents(NamedTuple):
    """A sample and its documents."""

    sample: Sample
    documents: list[MaskedTokens]


class _Encoder:
    """Encoder that renders the open traces of samples and chooses among them."""

    def __init__(
        self, chat: ChatOptions, choice: Choice, encoder: ConversationEncoder | None = None
    ) -> None:
        self._encoder = encoder or ConversationEncoder(chat)
        self._choice = choice

    def encode(self, samples: list[Sample]) -> list[_Documents]:
        return [_Documents(sample, self._documents(sample)) for sample in samples]

    def _documents(self, sample: Sample) -> list[MaskedTokens]:
        documents: list[MaskedTokens] = []
        for trace in sample.open:
            if documents and not self._choice.every_trace:
                trace.outcome = Outcome.NOT_CHOSEN
                continue
            document = self._encoder.encode(sample.where, trace.messages)
            trace.outcome = self._judge(document)
            if trace.outcome is Outcome.KEPT:
                documents.append(document)
        for trace in sample.traces:
            trace.messages = []  # frees memory
        return documents

    def _judge(self, document: MaskedTokens) -> Outcome:
        if not document.mask.any():
            return Outcome.MISSING_VALUE
        tokens = len(document.tokens)
        if tokens < self._choice.min_tokens:
            return Outcome.TOO_SHORT
        longest = self._choice.max_tokens
        return Outcome.TOO_LONG if longest is not None and tokens > longest else Outcome.KEPT


def _fill(
    journal: Journal, job: ConversationJob, encoder: ConversationEncoder, sets: EvaluationSets
) -> None:
    """Add all rows of the job to the journal."""
    rows = job.rows.read(journal.next_row, job.shard)
    samples = _without_overlaps(map(job.sample_of, rows), sets)
    make = partial(_Encoder, job.chat, job.choice)
    here = _Encoder(job.chat, job.choice, encoder)
    with progress_bar(_rows_of(job)) as advance:
        advance(job.shard.size(journal.next_row), "")
        for chunk in encode_in_order(_verified(samples, job), here, make, job.workers):
            for sample, documents in chunk:
                _count(journal, sample, documents)
                journal.add(sample.number, sample.record(), documents)
            advance(len(chunk), f"{journal.counts['documents']} documents")


def _rows_of(job: ConversationJob) -> int | None:
    return None if job.rows.total is None else job.shard.size(job.rows.total)


def _without_overlaps(samples: Iterator[Sample], sets: EvaluationSets) -> Iterator[Sample]:
    for sample in samples:
        if sample.rejected is None:
            sample.overlap = sets.find(sample.problem)
            if sample.overlap is not None:
                sample.rejected = Outcome.EVALUATION_OVERLAP
        yield sample


def _verified(samples: Iterator[Sample], job: ConversationJob) -> Iterator[Sample]:
    if not job.verify:
        yield from samples
        return
    with Verifier(job.workers) as verifier:
        verified = verifier.verified(
            samples, lambda sample: [t.attempt for t in sample.open if t.attempt is not None]
        )
        for sample, verdicts in verified:
            for trace, verdict in zip(sample.open, verdicts, strict=True):
                trace.attempt = None  # frees memory
                if verdict is not Verdict.CORRECT:
                    trace.outcome = Outcome(verdict.value)
            yield sample


def _count(journal: Journal, sample: Sample, documents: list[MaskedTokens]) -> None:
    counts = journal.counts
    counts["rows"] += 1
    counts[f"rows: {sample.outcome.value}"] += 1
    counts["documents"] += len(documents)
    counts[f"documents of {sample.source}"] += len(documents)
    counts["loss_tokens"] += sum(int(mask.sum(dtype="int64")) for _, mask in documents)
    if sample.rejected is None:
        for trace in sample.traces:
            counts[f"traces: {trace.outcome.value}"] += 1
    if sample.overlap is not None:
        counts[f"overlaps: {sample.overlap.label}"] += 1
