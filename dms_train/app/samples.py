"""The samples and batches of a run: training, evaluations, and the text of the self-test."""

from __future__ import annotations

import math

import torch

from dms_train.app.preparation import Prepared
from dms_train.app.teacher_logits import (
    TRAIN,
    VALID,
    samples_of_a_pass,
    stored_counts,
    stored_teacher,
)
from dms_train.config.schema import RunConfig
from dms_train.data.batches import Batch, BatchSource
from dms_train.data.manifest import read_manifest
from dms_train.data.tokens import TokenSamples, build_datasets
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.options import FP8_MULTIPLE
from dms_train.training.options import TEACHER_LOGITS

_SELFTEST_TOKENS = 128  # beyond the window, so that evictions show


def datasets(
    prepared: Prepared, view: ParallelView
) -> tuple[TokenSamples | None, TokenSamples | None]:
    """Return the numbered samples for training and, where configured, for evaluations."""
    config = prepared.config
    counts = stored_counts(config) or {
        TRAIN: max(_training_samples(prepared), 1),
        VALID: _eval_samples(config, view),
    }
    eod = next((m.eod_id for m in map(read_manifest, config.data.paths)), None)
    cache = config.data.cache_dir or str(prepared.folder / "data_cache")
    return build_datasets(
        config.data,
        vocab_size=prepared.architecture.vocab_size,
        eod_id=-1 if eod is None else eod,
        train_samples=counts[TRAIN],
        valid_samples=counts[VALID],
        seed=config.run.seed,
        cache_dir=cache,
    )


def _training_samples(prepared: Prepared) -> int:
    """Return the number of samples that the stages of a run take."""
    config = prepared.config
    stored = config.stage.teacher_logits.samples
    if TEACHER_LOGITS in config.stage.run and stored is not None:
        return stored
    return prepared.steps * config.data.global_batch_size


def _eval_samples(config: RunConfig, view: ParallelView) -> int:
    """Round `run.eval_samples` up to whole passes of all ranks."""
    unit = samples_of_a_pass(config, view.dp_size)
    return -(-config.run.eval_samples // unit) * unit


def evaluation_source(config: RunConfig, view: ParallelView, samples: TokenSamples) -> BatchSource:
    """Return this rank's part of an evaluation, which takes as many samples as whole passes can."""
    unit = samples_of_a_pass(config, view.dp_size)
    return batch_source(config, view, samples, len(samples) - len(samples) % unit)


def batch_source(
    config: RunConfig, view: ParallelView, samples: TokenSamples | None, size: int | None = None
) -> BatchSource:
    """Return this rank's part of global batches: of training, or of `size` samples to evaluate."""
    assert samples is not None
    return BatchSource(
        samples,
        micro_batch_size=config.data.micro_batch_size,
        global_batch_size=size or config.data.global_batch_size,
        data_parallel_rank=view.dp_rank,
        data_parallel_size=view.dp_size,
        teacher=stored_teacher(config, view, TRAIN if size is None else VALID),
    )


def selftest_tokens(samples: TokenSamples | None, config: RunConfig) -> torch.Tensor:
    """Return the first sample of the validation split, or else of the training split."""
    assert samples is not None
    wanted = config.method.window + _SELFTEST_TOKENS
    shards = config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size
    return samples[0].tokens[: min(config.data.seq_length, -(-wanted // shards) * shards)]


def beginning(batches: list[Batch], tokens: int, view: ParallelView) -> list[Batch]:
    """Return up to `tokens` positions of the first micro-batches of this rank."""
    # the interleaved schedule takes multiples of the number of stages
    multiple = view.pp_size if view.vp_size else 1
    needed = math.ceil(tokens / batches[0].tokens.numel())
    taken = batches[: math.ceil(needed / multiple) * multiple]
    return [_shortened(batch, tokens // len(taken), view.tp_size * view.cp_size) for batch in taken]


def _shortened(batch: Batch, tokens: int, shards: int) -> Batch:
    """Return about `tokens` positions, in a length that FP8 products of each shard can have."""
    multiple = shards * FP8_MULTIPLE
    length = min(batch.tokens.shape[1], max(multiple, tokens - tokens % multiple))
    return batch.first(max(1, tokens // length), length)
