"""Check, before the first step, that the teacher of a run predicts its training data.

A teacher with zero or unrelated weights has finite outputs. A student that learns from them loses
what it knew, and no loss curve shows it.
"""

from __future__ import annotations

import math

from dms_train.app.preparation import Prepared
from dms_train.app.samples import beginning
from dms_train.config.build import ConfigError
from dms_train.mcore.engine import McoreEngine
from dms_train.method.plan import StepPlan
from dms_train.observe import log
from dms_train.training.engine import TokenSource
from dms_train.training.options import TEACHER_LOGITS

_TOKENS = 2048  # of every data-parallel copy
# Margin below the loss of a uniform guess: a perplexity of 0.9 times the vocabulary.
_MARGIN = -math.log(0.9)


class TeacherError(ConfigError):
    """The teacher of a run predicts its training data no better than by guessing."""


def check_teacher(prepared: Prepared, engine: McoreEngine, source: TokenSource) -> None:
    """Measure the teacher's loss on the first samples, in one forward pass.

    A resumed run is not checked again: its teacher must have the same files.

    Args:
        prepared: The run, at the point it starts from.
        engine: Student and teacher, before the first step.
        source: Training data.

    Raises:
        TeacherError: The loss is that of a guess, or not finite; the same on every rank.
    """
    config = prepared.config
    stores = TEACHER_LOGITS in config.stage.run
    if prepared.start.resumes or not (engine.has_teacher or stores) or not config.run.check_teacher:
        return
    batches = beginning(source.microbatches(0), _TOKENS, engine.view)
    if stores:  # the student is the original
        loss = engine.evaluate(StepPlan(loss="lm"), batches).token_loss
    else:
        loss = engine.teacher_loss(batches)
    guess = math.log(prepared.architecture.vocab_size)
    if not loss < guess - _MARGIN:
        raise TeacherError(
            f"model.path={config.model.path}: the teacher's loss on the first samples of "
            f"data.paths is {loss:.2f} nats per token, and guessing has {guess:.2f}; correct the "
            "weights or the data, or set run.check_teacher=false for a model with random weights"
        )
    log.logger().info("teacher: %.4f nats per token on the first samples", loss)
