"""One run from a checked configuration to finished stages: objects built, one call made."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path

import torch

from dms_train.cli import errors, launcher, run_folder
from dms_train.cli.exporter import ModelExporter, run_provenance
from dms_train.cli.memory_check import check_memory
from dms_train.cli.plan import describe
from dms_train.cli.preparation import Prepared, prepare
from dms_train.cli.start_point import load_start
from dms_train.cli.validator import ModelValidator
from dms_train.cli.watch import RunWatch, end_hanging_run
from dms_train.config.build import ConfigError
from dms_train.config.flops import forward_flops_per_token
from dms_train.config.schema import RunConfig
from dms_train.data.batches import BatchSource
from dms_train.data.manifest import read_manifest
from dms_train.data.tokens import TokenSamples, build_datasets
from dms_train.hf.directory import WeightReader
from dms_train.kernels import api as kernels
from dms_train.mcore import groups, layers
from dms_train.mcore.engine import EngineOptions, McoreEngine
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.weights import RandomWeights
from dms_train.observe import log
from dms_train.observe.heartbeats import Heartbeats
from dms_train.observe.metrics import Compute, Means, Throughput
from dms_train.observe.progress import open_progress
from dms_train.observe.sinks import Sink, open_sinks
from dms_train.observe.state_files import StateFiles
from dms_train.training import loop
from dms_train.training.loop import LoopParts
from dms_train.training.reporting import Reporter
from dms_train.training.saving import Saver
from dms_train.training.skipping import SkipRecord
from dms_train.training.stages import Stage
from dms_train.training.state import TrainState

_SELFTEST_TOKENS = 128  # behind the window, so that evictions show


def run(config: RunConfig, until: str | None = None) -> None:
    """Validate, then run the stages of a configuration.

    Args:
        config: What to do.
        until: Leave after this stage of `stage.run`; None runs all.

    Raises:
        ConfigError: Before anything is allocated, one line for each problem.
        ValueError: Of the room that refused its input.
    """
    log.configure(launcher.rank())
    files = StateFiles(Path(config.run.dir))
    prepared = None
    try:
        count = _stage_count(config, until)
        prepared = prepare(config)
        _start(prepared, count, files)
    except Exception as error:
        _say_why(error, files, begun=prepared is not None)
        raise


def _say_why(error: Exception, files: StateFiles, *, begun: bool) -> None:
    """Leave for the launch scripts why this rank ends, and whether trying again is of use."""
    attempt, lines = launcher.attempt(), errors.describe(error)
    if attempt is None:
        return
    with contextlib.suppress(OSError):  # such as the full disk that is reported
        files.failed(launcher.rank(), attempt, error, lines)
        if not begun and launcher.rank() == 0 and errors.is_refusal(error):
            files.refused(lines)


def _stage_count(config: RunConfig, until: str | None) -> int:
    """How many entries of `stage.run` to run."""
    names = list(config.stage.run)
    if until is None:
        return len(names)
    if until not in names:
        raise ConfigError(f"--until {until}: not in stage.run; choose one of {', '.join(names)}")
    return len(names) - names[::-1].index(until)


def _start(prepared: Prepared, count: int, files: StateFiles) -> None:
    config = prepared.config
    if config.run.dry_run:
        if launcher.rank() == 0:
            ratio = prepared.start.state.loaded_cr
            text = describe(config, prepared.architecture, launcher.world_size(), ratio)
            sys.stdout.write(f"{text}\ndry run: nothing was started\n")
        return
    if prepared.start.state.stage >= count:
        log.logger().info("nothing left to do: %s is finished", config.run.dir)
        _say_done(prepared, prepared.start.state, files)
        return
    _announce_kernels(config)
    run_folder.write(config, leads=launcher.rank() == 0)
    view = groups.start(config.parallel, config.run.seed)
    check_memory(config, prepared.architecture, view)
    if view.rank == 0:
        files.begin()
    watch = RunWatch(files, view, _heartbeats(config, view, files))
    watch.listen()
    try:
        state = _run(prepared, view, watch, count)
    except RuntimeError as error:
        if errors.lost_peer(error):
            raise errors.PeerLost(
                f"rank {view.rank}: another rank ended or did not answer; its own message above "
                "says why. Start the same command again to resume from the newest checkpoint"
            ) from error
        raise
    finally:
        watch.leave()
    _say_done(prepared, state, files)
    groups.stop()


def _heartbeats(config: RunConfig, view: ParallelView, files: StateFiles) -> Heartbeats:
    return Heartbeats(
        folder=files.state / "ranks",
        rank=view.rank,
        ranks=view.world_size,
        # before the collectives give up, which cannot say for whom they waited
        patience=config.parallel.distributed_timeout_minutes * 60 / 2,
        hang=end_hanging_run(files),
    )


def _say_done(prepared: Prepared, state: TrainState, files: StateFiles) -> None:
    """Leave marks for what is finished; of use when an earlier process was killed before it did."""
    if launcher.rank() != 0:
        return
    names = prepared.config.stage.run
    for name in names[: state.stage]:
        files.done(name, state.step)
    if state.stage >= len(names):
        files.all_done()


def _announce_kernels(config: RunConfig) -> None:
    """Refuse a backend and layers that cannot train on this machine; say which one will."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers.choose(config.parallel.layers, device)
    name = kernels.choose(config.kernels, device)
    log.logger().info("attention: %s kernels on %s", name, device.type.upper())


def _run(prepared: Prepared, view: ParallelView, watch: RunWatch, count: int) -> TrainState:
    """Run the first `count` stages; where the run then stands."""
    config = prepared.config
    leads = view.rank == 0
    prepared = replace(prepared, start=run_folder.verified(config, prepared.start, view))
    run_folder.set_aside(prepared.start, leads=leads)
    engine = build_engine(prepared, view)
    state = prepared.start.state
    train, valid = datasets(prepared, view)
    source = batch_source(config, view, train)
    eval_batches = (
        [] if valid is None else batch_source(config, view, valid, len(valid)).microbatches(0)
    )
    provenance = run_provenance(prepared.architecture, config.model.path)
    exporter = ModelExporter(
        engine=engine,
        options=config.stage.export,
        folder=prepared.folder / "exports",
        tokens=_selftest_tokens(valid or train, config),
        source_dir=prepared.start.tokenizer_dir,
        params_dtype=config.parallel.params_dtype,
        provenance=provenance,
    )
    reporter = _reporter(prepared, state, view)
    saver = Saver(
        engine=engine,
        reporter=reporter,
        options=config.run,
        folder=prepared.folder / "checkpoints",
        leads=leads,
        provenance=provenance,
    )
    # what the sinks still have to send keeps nobody waiting
    with contextlib.closing(reporter), watch.expecting_ranks(engine):
        return loop.run(
            prepared.stages[:count],
            state,
            LoopParts(
                engine=engine,
                source=source,
                exporter=exporter,
                validator=_validator(prepared, valid),
                reporter=reporter,
                watch=watch,
                saver=saver,
                skips=SkipRecord(
                    folder=prepared.folder / "skipped",
                    most=config.run.max_skipped_steps,
                    leads=leads,
                ),
                options=config.run,
                global_batch_size=config.data.global_batch_size,
                eval_batches=eval_batches,
                every_integer_cr=_exports_integers(config),
            ),
        )


def _validator(prepared: Prepared, samples: TokenSamples | None) -> ModelValidator:
    return ModelValidator(
        folder=prepared.folder,
        teacher=prepared.start.model_dir,
        samples=samples,
        options=prepared.config.stage.validate,
        since=prepared.since,
    )


def _exports_integers(config: RunConfig) -> bool:
    return "export" in config.stage.run and config.stage.export.every_integer_cr


def build_engine(prepared: Prepared, view: ParallelView) -> McoreEngine:
    """Student at its start, and the teacher where a remaining stage distills."""
    config, start = prepared.config, prepared.start
    options = EngineOptions(
        parallel=config.parallel,
        optim=config.optim,
        seed=config.run.seed,
        kernels=config.kernels,
    )
    original = None if start.model_dir is None else WeightReader(start.model_dir)
    random = RandomWeights(prepared.architecture, config.run.seed, config.model.init_std)
    # weights that a student's replace need not be read
    source = None if start.student is not None else original or random
    engine = McoreEngine(prepared.architecture, prepared.spec, view, options, source)
    log.logger().info("layers: %s", engine.describe_layers())
    remaining = prepared.stages[start.state.stage :]
    if original is not None and any(
        isinstance(s, Stage) and s.loss == "distill" for s in remaining
    ):
        engine.attach_teacher(original)
    load_start(engine, start)
    return engine


def datasets(
    prepared: Prepared, view: ParallelView
) -> tuple[TokenSamples | None, TokenSamples | None]:
    """Numbered samples for training and, where wanted, for evaluations."""
    config = prepared.config
    steps = sum(stage.steps for stage in prepared.stages if isinstance(stage, Stage))
    eod = next((m.eod_id for m in map(read_manifest, config.data.paths)), None)
    cache = config.data.cache_dir or str(prepared.folder / "data_cache")
    return build_datasets(
        config.data,
        vocab_size=prepared.architecture.vocab_size,
        eod_id=-1 if eod is None else eod,
        train_samples=max(steps * config.data.global_batch_size, 1),
        valid_samples=_eval_samples(config, view),
        seed=config.run.seed,
        cache_dir=cache,
    )


def _eval_samples(config: RunConfig, view: ParallelView) -> int:
    """`run.eval_samples` rounded up to whole passes of all ranks."""
    unit = config.data.micro_batch_size * view.dp_size * (view.pp_size if view.vp_size else 1)
    return -(-config.run.eval_samples // unit) * unit


def batch_source(
    config: RunConfig, view: ParallelView, samples: TokenSamples | None, size: int | None = None
) -> BatchSource:
    """This rank's part of global batches of `size` samples, by default those of training."""
    assert samples is not None
    return BatchSource(
        samples,
        micro_batch_size=config.data.micro_batch_size,
        global_batch_size=size or config.data.global_batch_size,
        data_parallel_rank=view.dp_rank,
        data_parallel_size=view.dp_size,
    )


def _selftest_tokens(samples: TokenSamples | None, config: RunConfig) -> torch.Tensor:
    """A real text of the data, the first sample of the validation split if there is one."""
    assert samples is not None
    wanted = config.method.spec().window + _SELFTEST_TOKENS
    shards = config.parallel.tensor_model_parallel_size
    return samples[0].tokens[: min(config.data.seq_length, -(-wanted // shards) * shards)]


def _reporter(prepared: Prepared, state: TrainState, view: ParallelView) -> Reporter:
    config, leads = prepared.config, view.rank == 0
    sinks: list[Sink] = []
    if leads:
        sinks = open_sinks(
            config.observe,
            Path(config.run.dir),
            run_folder.mapping(config),
            resume_step=state.step,
            warn=log.logger().warning,
        )
    return Reporter(
        sinks=sinks,
        progress=open_progress(leads and config.observe.progress),
        tokens_per_step=config.data.global_batch_size * config.data.seq_length,
        log_interval=config.run.log_interval,
        throughput=Throughput(),
        means=Means(),
        compute=Compute(
            forward_flops=forward_flops_per_token(prepared.architecture, config.data.seq_length),
            devices=view.world_size,
            peak_tflops=config.observe.peak_tflops,
        ),
    )
