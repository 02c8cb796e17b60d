"""Size of what the stage `teacher_logits` stores, which later runs read."""

from __future__ import annotations

from dms_train.config.schema import RunConfig
from dms_train.training.options import TEACHER_LOGITS

_PROBABILITY, _TOKEN, _TAIL = 2, 4, 4  # bytes


def stored_tokens(config: RunConfig, vocab_size: int) -> int:
    """Return the stored tokens of a position: `top_k`, or the whole vocabulary if it is smaller."""
    return min(config.stage.teacher_logits.top_k, vocab_size)


def token_bytes(top_k: int) -> int:
    """Return the stored bytes of a position."""
    return top_k * (_PROBABILITY + _TOKEN) + _TAIL


def stored_bytes(config: RunConfig, vocab_size: int) -> int:
    """Return the bytes that the run stores; 0 without the stage."""
    options = config.stage.teacher_logits
    if TEACHER_LOGITS not in config.stage.run:
        return 0
    samples = (options.samples or 0) + config.run.eval_samples
    return samples * config.data.seq_length * token_bytes(stored_tokens(config, vocab_size))


def step_bytes(config: RunConfig, vocab_size: int, samples: int) -> int:
    """Return the bytes of a rank's `samples` of a step that reads stored distributions, else 0."""
    if config.teacher.logits is None:
        return 0
    # as many tokens of a position as the same configuration would store
    return samples * config.data.seq_length * token_bytes(stored_tokens(config, vocab_size))
