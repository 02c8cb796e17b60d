"""Build the components of the training loop: exporter, validator, saver, reporter, batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dms_train.app import run_folder, training_data
from dms_train.app.export_evaluation import ModelValidator
from dms_train.app.exporter import ModelExporter, run_provenance
from dms_train.app.frozen_base import described_base
from dms_train.app.preparation import Prepared
from dms_train.app.samples import batch_source, datasets, evaluation_source, selftest_tokens
from dms_train.app.task_evaluation import TaskEvaluator
from dms_train.app.teacher_logits import TRAIN, VALID, TeacherPass, record
from dms_train.app.watch import RunWatch
from dms_train.config.schema import RunConfig
from dms_train.data.batches import BatchSource
from dms_train.data.tokens import TokenSamples
from dms_train.export.card import TRAINING_DATA
from dms_train.mcore.engine import McoreEngine
from dms_train.mcore.groups import ParallelView
from dms_train.observe import log
from dms_train.observe.metrics import Compute, Means, Throughput
from dms_train.observe.progress import open_progress
from dms_train.observe.sinks import Sink, open_sinks
from dms_train.planning.flops import forward_flops_per_token, student_flops_per_token
from dms_train.planning.stored_teacher import stored_tokens
from dms_train.training.loop import TrainerComponents
from dms_train.training.reporting import Reporter
from dms_train.training.saving import Saver
from dms_train.training.skipping import SkipRecord
from dms_train.training.state import TrainState


def trainer_components(
    prepared: Prepared,
    view: ParallelView,
    engine: McoreEngine,
    watch: RunWatch,
    contents: dict[str, Any],
) -> TrainerComponents:
    """Build everything that the training loop calls.

    Args:
        prepared: The run, at the point it starts from.
        view: This rank's position in the layout.
        engine: Student and teacher.
        watch: Signals and heartbeats.
        contents: Record of the run's inputs, stored with every checkpoint.
    """
    config, is_main_rank = prepared.config, view.rank == 0
    train, valid = datasets(prepared, view)
    source = batch_source(config, view, train)
    evaluated = None if valid is None else evaluation_source(config, view, valid)
    provenance = _provenance(prepared)
    exporter = _exporter(prepared, engine, valid or train, provenance)
    reporter = _reporter(prepared, prepared.start.state, view)
    saver = Saver(
        engine=engine,
        reporter=reporter,
        options=config.run,
        folder=prepared.folder / "checkpoints",
        is_main_rank=is_main_rank,
        provenance={
            **provenance,
            **contents,
            **described_base(prepared.start.adapter_base, config.parallel.params_dtype),
        },
    )
    return TrainerComponents(
        engine=engine,
        source=source,
        exporter=exporter,
        validator=_validator(prepared, valid),
        evaluator=TaskEvaluator(folder=prepared.folder, options=config.stage.run_tasks),
        teacher_pass=_teacher_pass(prepared, engine, source, evaluated, contents),
        reporter=reporter,
        watch=watch,
        saver=saver,
        skips=SkipRecord(
            folder=prepared.folder / "skipped",
            max_consecutive=config.run.max_skipped_steps,
            is_main_rank=is_main_rank,
        ),
        options=config.run,
        global_batch_size=config.data.global_batch_size,
        eval_batches=[] if evaluated is None else evaluated.microbatches(0),
        every_integer_cr=_exports_integers(config),
    )


def _teacher_pass(
    prepared: Prepared,
    engine: McoreEngine,
    train: BatchSource,
    valid: BatchSource | None,
    contents: dict[str, Any],
) -> TeacherPass:
    config = prepared.config
    return TeacherPass(
        engine=engine,
        sources={TRAIN: train} | ({} if valid is None else {VALID: valid}),
        samples={
            TRAIN: config.stage.teacher_logits.samples or 0,
            VALID: 0 if valid is None else valid.global_batch_size,
        },
        made_with=record(config, prepared.architecture, contents),
        folder=prepared.folder,
        top_k=stored_tokens(config, prepared.architecture.vocab_size),
        view=engine.view,
    )


def _exporter(
    prepared: Prepared,
    engine: McoreEngine,
    samples: TokenSamples | None,
    provenance: dict[str, Any],
) -> ModelExporter:
    config = prepared.config
    return ModelExporter(
        engine=engine,
        options=config.stage.export,
        folder=prepared.folder / "exports",
        tokens=selftest_tokens(samples, config),
        source_dir=prepared.start.tokenizer_dir,
        params_dtype=config.parallel.params_dtype,
        provenance=provenance,
        adapter_base=prepared.start.adapter_base,
    )


def _provenance(prepared: Prepared) -> dict[str, Any]:
    config, start = prepared.config, prepared.start
    return {
        **run_provenance(prepared.architecture, config.model.path, start.model_dir),
        TRAINING_DATA: training_data.describe(config.data, start),
    }


def _validator(prepared: Prepared, samples: TokenSamples | None) -> ModelValidator:
    return ModelValidator(
        folder=prepared.folder,
        teacher=prepared.start.model_dir,
        samples=samples,
        options=prepared.config.stage.validate_export,
        since=prepared.since,
    )


def _exports_integers(config: RunConfig) -> bool:
    return "export" in config.stage.run and config.stage.export.every_integer_cr


def _reporter(prepared: Prepared, state: TrainState, view: ParallelView) -> Reporter:
    config, is_main_rank = prepared.config, view.rank == 0
    sinks: list[Sink] = []
    if is_main_rank:
        sinks = open_sinks(
            config.observe,
            Path(config.run.dir),
            run_folder.mapping(config),
            resume_step=state.step,
            warn=log.logger().warning,
        )
    return Reporter(
        sinks=sinks,
        progress=open_progress(is_main_rank and config.observe.progress),
        tokens_per_step=config.data.global_batch_size * config.data.seq_length,
        log_interval=config.run.log_interval,
        throughput=Throughput(),
        means=Means(),
        compute=Compute(
            forward_flops=0
            if config.teacher.logits is not None
            else forward_flops_per_token(prepared.architecture, config.data.seq_length),
            student_flops=student_flops_per_token(
                prepared.architecture, config.data.seq_length, config.trainable, config.method
            ),
            devices=view.world_size,
            peak_tflops=config.observe.peak_tflops,
        ),
    )
