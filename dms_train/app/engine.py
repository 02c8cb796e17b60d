"""The engine of a run: the student at its start, and the teacher where a loss needs it."""

from __future__ import annotations

from dms_train.app.preparation import Prepared
from dms_train.app.start_point import load_start
from dms_train.hf.weight_reader import WeightReader
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.method.token_losses import token_loss
from dms_train.observe import log
from dms_train.training.options import TEACHER_LOGITS
from dms_train.training.stages import Stage


def build_engine(prepared: Prepared, view: ParallelView) -> McoreEngine:
    """Build the student, and the teacher if the loss of a remaining stage needs it."""
    config, start = prepared.config, prepared.start
    options = TrainEngineOptions(
        parallel=config.parallel,
        optim=config.optim,
        seed=config.run.seed,
        kernels=config.kernels,
        loss=config.loss,
        trainable=config.trainable,
        trains=TEACHER_LOGITS not in config.stage.run,
        reads_teacher=config.teacher.logits is not None,
        offloads_teacher=config.teacher.offload,
        packs_documents=config.data.packing,
    )
    original = None if start.model_dir is None else WeightReader(start.model_dir)
    random = RandomWeights(prepared.architecture, config.run.seed, config.model.init_std)
    # a student's checkpoint replaces the original weights, which only a shared teacher keeps
    begins_as_original = start.student is None or config.shares_teacher
    source = original or random if begins_as_original else None
    method = config.method.override(channel=prepared.spec.channel)
    engine = McoreEngine(prepared.architecture, method, view, options, source)
    log.logger().info("layers: %s", engine.describe_layers())
    remaining = prepared.stages[start.state.stage :]
    losses = [token_loss(s.loss) for s in remaining if isinstance(s, Stage)]
    distills = any(loss.needs_teacher for loss in losses)
    if original is not None and distills and config.teacher.logits is None:
        # a student that starts as the original already holds the teacher's weights
        engine.attach_teacher(None if begins_as_original else original)
    load_start(engine, start)
    return engine
