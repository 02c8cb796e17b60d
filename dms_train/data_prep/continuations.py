"""Generation of documents: a model continues prompts, and a shard stores the results.

A continuation depends on the seed of its row and on its number. The shard therefore does not depend
on the other prompts of a batch, on the order in which they finish, or on interruptions, except for
the rounding of batched products.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dms_train.data.errors import DataError
from dms_train.data.manifest import Manifest, file_sha256
from dms_train.data.origins import UNKNOWN_TERMS, Terms
from dms_train.data.writer import package_versions
from dms_train.data_prep.continuation_filters import Continued, filter_continuations
from dms_train.data_prep.conversations import LossOn, MaskedTokens
from dms_train.data_prep.journal import Journal
from dms_train.data_prep.overlap import EvaluationSets
from dms_train.data_prep.progress import progress_bar
from dms_train.data_prep.prompts import Prompt, PromptEncoder, PromptOptions
from dms_train.data_prep.rows import Rows, Shard
from dms_train.data_prep.shard_files import PreparedShard, shard_prefix, write_shard
from dms_train.evaluation.verification import require_math_verify
from dms_train.inference.options import EngineOptions, SamplingParams

if TYPE_CHECKING:
    from dms_train.inference.engine import InferenceEngine
    from dms_train.inference.outputs import CompletionOutput

_PACKAGES = ("dms-train", "math-verify", "tokenizers", "torch", "transformers")
_AHEAD = 8  # rows read beyond the first unfinished one, in units of the running sequences
_ENGINE_SETTINGS = ("policy", "policy_options", "cache", "max_model_len", "dtype")
# Name in the manifest for each end of a continuation.
_ENDS = {"stop": "finished", "length": "cut", "memory": "out_of_memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationJob:
    """One shard to make.

    Attributes:
        model: Directory of the model.
        output: Prefix of the files to write.
        rows: Source of the prompts.
        prompts: Conversion of a row to a prompt.
        sampling: Sampling parameters: `n` continuations of each prompt, and `seed` for all of them.
        engine: Engine options.
        loss_on: Tokens that the loss counts: the generated ones, or all.
        append_eod: Append the tokenizer's `eos_token` to every document.
        only_finished: Leave out continuations that do not end in an end-of-text token.
        terms: Source and licence of the prompts.
        evaluation_sets: Files whose problems must not be trained on.
        limit: Number of rows to read; None takes all.
        shard: Part of the rows to read.
        overwrite: Replace an existing shard or unfinished work with other settings.
    """

    model: Path
    output: Path
    rows: Rows
    prompts: PromptOptions
    sampling: SamplingParams
    engine: EngineOptions
    loss_on: LossOn = LossOn.ASSISTANT
    append_eod: bool = False
    only_finished: bool = False
    terms: Terms = UNKNOWN_TERMS
    evaluation_sets: tuple[Path, ...] = ()
    limit: int | None = None
    shard: Shard = field(default_factory=Shard)
    overwrite: bool = False


@dataclass(slots=True)
class Speed:
    """Speed of one call, without the time to load the model.

    Attributes:
        tokens: Generated tokens.
        kept_tokens: Generated tokens of the documents.
        seconds: Time until the last row was stored.
    """

    tokens: int = 0
    kept_tokens: int = 0
    seconds: float = 0.0

    def line(self, device: str) -> str:
        """Describe the speed and its cost in hours of a device, such as `GPU`."""
        hours = self.seconds / 3600 * 1e6
        kept = f"{hours / self.kept_tokens:.3g} per million" if self.kept_tokens else "none"
        return (
            f"{self.tokens} tokens generated in {self.seconds:.1f} s: "
            f"{self.tokens / self.seconds:.0f} tokens/s, {hours / self.tokens:.3g} {device} hours "
            f"per million tokens; {kept} kept"
        )


class _Model(NamedTuple):
    """Facts about a model that are known before it is loaded.

    Attributes:
        sha256: Hash of weights, configuration and tokenizer.
        vocab_size: Number of rows of the embedding.
        longest: Largest number of tokens in a sequence.
        stop_ids: End-of-text tokens.
    """

    sha256: str
    vocab_size: int
    longest: int
    stop_ids: list[int]


def make_shard(job: ContinuationJob, speed: Speed | None = None) -> Manifest:
    """Make one shard, or continue an interrupted call.

    Prompts in files are read and checked before the model is loaded.

    Args:
        job: Shard to make.
        speed: Counters to fill.

    Raises:
        DataError: An input is unfit, nothing is kept, or the output cannot be written.
        EvaluationError: Answers are to be verified and math-verify is not installed.
        InferenceError: The model cannot be run with these options.
        HFError: A file of the model is damaged, or its family is not supported.
    """
    model = _describe(job)
    sets = EvaluationSets(job.evaluation_sets)
    encoder = PromptEncoder(job.prompts, sets, model.longest)
    if job.prompts.answer_column is not None:
        require_math_verify()
    if job.append_eod and encoder.eos_id is None:
        raise DataError(f"{job.model}: the tokenizer has no eos_token to append")
    shard = PreparedShard(
        prefix=shard_prefix(job.output, job.shard),
        sources=job.rows.sources,
        settings=_settings(job, model, encoder, sets),
        vocab_size=max(encoder.vocab_size, model.vocab_size),
        eod_id=encoder.eos_id if job.append_eod else None,
        loss_mask=job.loss_on is not LossOn.ALL,
        counted=("continuations", "outcomes", "overlaps"),
        terms=job.terms,
        rows_per_commit=job.engine.max_num_seqs,
        overwrite=job.overwrite,
    )
    speed = Speed() if speed is None else speed
    return write_shard(shard, lambda journal: _fill(journal, job, encoder, speed))


def _describe(job: ContinuationJob) -> _Model:
    # not at the top of the file, because they import torch and `dms-data --help` must start fast
    from dms_train.evaluation.scaling.run import model_hash
    from dms_train.hf.directory import read_architecture
    from dms_train.hf.weight_reader import WeightReader
    from dms_train.inference.cache_builder import longest_sequence
    from dms_train.inference.tokenizer import read_stop_ids

    architecture = read_architecture(job.model)
    WeightReader(job.model).require(architecture)
    return _Model(
        sha256=model_hash(job.model),
        vocab_size=architecture.vocab_size,
        longest=longest_sequence(architecture, job.engine),
        stop_ids=sorted(read_stop_ids(job.model)),
    )


def _settings(
    job: ContinuationJob, model: _Model, encoder: PromptEncoder, sets: EvaluationSets
) -> dict[str, Any]:
    """Return all settings that affect the documents."""
    engine = asdict(job.engine)
    settings = {
        "command": "generate",
        "model": job.model.resolve().name,
        "model_sha256": model.sha256,
        "stop_token_ids": model.stop_ids,
        "engine": {name: engine[name] for name in _ENGINE_SETTINGS},
        "sampling": asdict(job.sampling),
        "sources": [[source.name, source.sha256] for source in job.rows.sources],
        "limit": job.limit,
        "shard": [job.shard.index, job.shard.count],
        "evaluation_sets": sets.sets,
        "tokenizer_sha256": file_sha256(job.model / "tokenizer.json"),
        "column": job.prompts.column,
        "chat": job.prompts.chat,
        "suffix": job.prompts.suffix,
        "beginning": job.prompts.beginning,
        "answer_column": job.prompts.answer_column,
        "only_finished": job.only_finished,
        "chat_template": encoder.chat_template,
        "template_variables": dict(job.prompts.variables),
        "loss_on": job.loss_on.value,
        "append_eod": job.append_eod,
        "versions": package_versions(_PACKAGES),
    }
    stored: dict[str, Any] = json.loads(json.dumps(settings))  # equal to values of a manifest
    return stored


def _fill(journal: Journal, job: ContinuationJob, encoder: PromptEncoder, speed: Speed) -> None:
    """Add all rows of the job to the journal."""
    total = _rows_of(job)
    if total is not None:
        _check_rows(journal, job, encoder)
    prompts = _prompts(journal.next_row, job, encoder)
    first = next(prompts, None)
    if first is None:
        return
    from dms_train.inference.engine import InferenceEngine

    engine = InferenceEngine(job.model, job.engine)
    engine.capture()
    since = time.monotonic()
    verify = job.prompts.answer_column is not None
    outputs = _in_order(engine, job, chain([first], prompts))
    with progress_bar(total) as advance:
        advance(job.shard.size(journal.next_row), "")
        for item in filter_continuations(outputs, only_finished=job.only_finished, verify=verify):
            documents = [_document(job, encoder, item.prompt, output) for output in item.kept]
            _count(journal.counts, item, documents)
            journal.add(item.prompt.number, _record(job, item), documents)
            speed.tokens += sum(len(one.output.token_ids) for one in item.continuations)
            speed.kept_tokens += sum(len(output.token_ids) for output in item.kept)
            speed.seconds = time.monotonic() - since
            advance(1, _progress(journal.counts))


def _check_rows(journal: Journal, job: ContinuationJob, encoder: PromptEncoder) -> None:
    """Refuse bad rows before the model is loaded, and an answer column without answers."""
    answers = [bool(prompt.answer) for prompt in _prompts(journal.next_row, job, encoder)]
    column = job.prompts.answer_column
    if column is not None and journal.next_row == 0 and answers and not any(answers):
        raise DataError(f"--answer-column {column}: no row has an answer there; correct the name")


def _rows_of(job: ContinuationJob) -> int | None:
    known = [rows for rows in (job.rows.total, job.limit) if rows is not None]
    return None if job.rows.total is None else job.shard.size(min(known))


def _prompts(first: int, job: ContinuationJob, encoder: PromptEncoder) -> Iterator[Prompt]:
    column = job.prompts.answer_column
    for row in job.rows.read(first, job.shard):
        if job.limit is not None and row.number >= job.limit:
            return
        # rows of a hub have all columns and are not read in advance, as `_check_rows` reads files
        if job.rows.total is None and column is not None and column not in row.values:
            raise DataError(f"{row.where}: no column {column}; correct --answer-column")
        yield encoder.encode(row)


def _in_order(
    engine: InferenceEngine, job: ContinuationJob, prompts: Iterator[Prompt]
) -> Iterator[tuple[Prompt, list[CompletionOutput]]]:
    """Yield prompts with their continuations, in order; a rejected prompt has none.

    A prompt starts as soon as an earlier one has finished.
    """
    slots = job.engine.max_num_seqs
    queue: deque[tuple[Prompt, str | None]] = deque()  # from the first unfinished prompt on
    finished: dict[str | None, list[CompletionOutput]] = {None: []}
    running = 0
    while True:
        while running < 2 * slots and len(queue) < _AHEAD * slots:
            prompt = next(prompts, None)
            if prompt is None:
                break
            queue.append((prompt, _start(engine, job, prompt)))
            running += prompt.rejected is None
        while queue and queue[0][1] in finished:
            prompt, request_id = queue.popleft()
            yield prompt, finished[request_id]
            if request_id is not None:
                del finished[request_id]
        if not queue:
            return
        for output in engine.step():
            finished[output.request_id] = output.outputs
            running -= 1


def _start(engine: InferenceEngine, job: ContinuationJob, prompt: Prompt) -> str | None:
    """Queue a prompt and return the id of its request."""
    if prompt.rejected is not None:
        return None
    params = replace(job.sampling, seed=_seed(job, prompt))
    return engine.add_request(prompt.tokens, params, final_only=True)


def _seed(job: ContinuationJob, prompt: Prompt) -> int:
    """Return the seed of the random numbers of a row."""
    drawn = hashlib.sha256(f"{job.sampling.seed}:{prompt.number}".encode()).digest()
    return int.from_bytes(drawn[:8], "big") >> 1


def _document(
    job: ContinuationJob, encoder: PromptEncoder, prompt: Prompt, output: CompletionOutput
) -> MaskedTokens:
    """Return the prompt with its continuation; the loss counts the generated tokens."""
    tokens = prompt.tokens + output.token_ids
    every = job.loss_on is LossOn.ALL
    mask = [int(every)] * len(prompt.tokens) + [1] * len(output.token_ids)
    if job.append_eod and encoder.eos_id is not None and tokens[-1] != encoder.eos_id:
        tokens.append(encoder.eos_id)
        mask.append(int(every))
    return MaskedTokens(np.array(tokens, np.int32), np.array(mask, np.uint8))


def _count(counts: Counter[str], item: Continued, documents: list[MaskedTokens]) -> None:
    prompt = item.prompt
    counts["rows"] += 1
    counts[f"rows: {item.outcome.value}"] += 1
    for one in item.continuations:
        counts[f"continuations: {_ENDS[one.output.finish_reason or '']}"] += 1
        counts[f"outcomes: {one.outcome.value}"] += 1
    if prompt.overlap is not None:
        counts[f"overlaps: {prompt.overlap.label}"] += 1
    counts["documents"] += len(documents)
    counts[f"documents of {prompt.source}"] += len(documents)
    counts["loss_tokens"] += sum(int(mask.sum(dtype="int64")) for _, mask in documents)


def _record(job: ContinuationJob, item: Continued) -> dict[str, Any]:
    """Return the row's line of the verdicts file."""
    prompt = item.prompt
    row: dict[str, Any] = {"row": prompt.number, "key": prompt.key, "outcome": item.outcome.value}
    if prompt.rejected is None:
        row["prompt_tokens"] = len(prompt.tokens)
        row["seed"] = _seed(job, prompt)
        row["continuations"] = [
            {
                "end": _ENDS[one.output.finish_reason or ""],
                "tokens": len(one.output.token_ids),
                "outcome": one.outcome.value,
            }
            for one in item.continuations
        ]
    if prompt.overlap is not None:
        row["overlap"] = prompt.overlap._asdict()
    return row


def _progress(counts: Counter[str]) -> str:
    return f"{counts['documents']} documents, {counts['loss_tokens']} tokens in the loss"
