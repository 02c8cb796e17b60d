"""One run from a checked configuration to finished stages: objects built, one call made."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dms_train.cli import launcher, run_folder
from dms_train.cli.errors import PeerLost, lost_peer
from dms_train.cli.exporter import ModelExporter, check_folder, check_format, run_provenance
from dms_train.cli.plan import describe
from dms_train.cli.start_point import StartPoint, find_start, load_start, with_student
from dms_train.cli.validator import ModelValidator, check_validation
from dms_train.config.build import ConfigError
from dms_train.config.check import check
from dms_train.config.flops import forward_flops_per_token
from dms_train.config.schema import RunConfig
from dms_train.data.batches import BatchSource
from dms_train.data.manifest import file_sha256, read_manifest
from dms_train.data.tokens import TokenSamples, build_datasets, check_files
from dms_train.hf.architecture import Architecture
from dms_train.hf.directory import WeightReader
from dms_train.kernels import api as kernels
from dms_train.mcore import groups
from dms_train.mcore.engine import EngineOptions, McoreEngine
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model import rope_arguments
from dms_train.mcore.weights import RandomWeights
from dms_train.method.spec import DMSSpec
from dms_train.observe import log
from dms_train.observe.metrics import Compute, Means, Throughput
from dms_train.observe.progress import open_progress
from dms_train.observe.sinks import Sink, open_sinks
from dms_train.training import loop
from dms_train.training.loop import LoopParts
from dms_train.training.reporting import Reporter
from dms_train.training.stages import Action, Stage, build_stages
from dms_train.training.state import TrainState

_SELFTEST_TOKENS = 128  # behind the window, so that evictions show


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """What is known before any process group exists."""

    config: RunConfig
    architecture: Architecture
    spec: DMSSpec
    start: StartPoint
    stages: list[Stage | Action]
    folder: Path
    since: float


def run(config: RunConfig) -> None:
    """Validate, then run the stages of a configuration.

    Raises:
        ConfigError: Before anything is allocated, one line for each problem.
        ValueError: Of the room that refused its input.
    """
    log.configure(launcher.rank())
    prepared = _prepare(config)
    if config.run.dry_run:
        if launcher.rank() == 0:
            ratio = prepared.start.state.loaded_cr
            text = describe(config, prepared.architecture, launcher.world_size(), ratio)
            sys.stdout.write(f"{text}\ndry run: nothing was started\n")
        return
    if prepared.start.state.stage >= len(prepared.stages):
        log.logger().info("nothing left to do: %s is finished", config.run.dir)
        return
    _announce_kernels(config)
    run_folder.write(config, leads=launcher.rank() == 0)
    view = groups.start(config.parallel, config.run.seed)
    try:
        _run(prepared, view)
    except RuntimeError as error:
        if lost_peer(error):
            raise PeerLost(
                f"rank {view.rank}: another rank ended or did not answer; its own message above "
                "says why. Start the same command again to resume from the newest checkpoint"
            ) from error
        raise
    groups.stop()


def _prepare(config: RunConfig) -> _Prepared:
    since = time.monotonic()
    original = find_start(config)
    check(config, world_size=launcher.world_size(), architecture=original.architecture)
    rope_arguments(original.architecture)  # refuses a rule that megatron-core lacks
    spec = config.method.spec()
    start = run_folder.resume_point(config, original)
    if start is None:
        load = config.run.load
        start = original if load is None else with_student(original, Path(load))
        start.require(spec)
        _check_lane(config, start)
    stages = build_stages(
        config.stage, config.optim.lr, config.optim.lr_warmup_steps, start.state.loaded_cr
    )
    _check_data(config, start)
    _check_export(config, start, stages)
    return _Prepared(
        config=config,
        architecture=start.architecture,
        spec=spec,
        start=start,
        stages=stages,
        folder=Path(config.run.dir),
        since=since,
    )


def _announce_kernels(config: RunConfig) -> None:
    """Refuse a backend that cannot train on this machine; say which one will."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = kernels.choose(config.kernels, device)
    log.logger().info("attention: %s kernels on %s", name, device.type.upper())


def _check_lane(config: RunConfig, start: StartPoint) -> None:
    """Refuse stages that do not fit the lane the student starts with."""
    run, borrowed = config.stage.run, start.state.lane_borrowed
    if borrowed and {"zero_neuron", "pretrain"} & set(run):
        raise ConfigError(
            f"run.load={start.student}: its lane is already borrowed for decisions; leave "
            "zero_neuron and pretrain out of stage.run"
        )
    loaded, retrofit = start.state.loaded_cr, config.stage.retrofit
    if "retrofit" in run and retrofit.start_cr is None and retrofit.target_cr < loaded:
        raise ConfigError(
            f"run.load={start.student}: its compression ratio {loaded:g} is above "
            f"stage.retrofit.target_cr={retrofit.target_cr:g}; anneal upwards"
        )
    if not borrowed and "hold" in run and "retrofit" not in run:
        raise ConfigError("stage.run: hold needs a retrofitted student; give one as run.load")
    if not borrowed and "retrofit" in run and "zero_neuron" not in run and launcher.rank() == 0:
        log.logger().warning("retrofit without zero_neuron: the borrowed neuron is cleared at once")


def _check_data(config: RunConfig, start: StartPoint) -> None:
    """Refuse data of another tokenizer or vocabulary before anything is allocated."""
    directory = start.tokenizer_dir
    tokenizer = None if directory is None else directory / "tokenizer.json"
    sha256 = file_sha256(tokenizer) if tokenizer is not None and tokenizer.is_file() else None
    vocab_size = start.architecture.vocab_size
    check_files(
        config.data,
        vocab_size=vocab_size,
        tokenizer_sha256=sha256,
        validates=config.run.eval_samples > 0,
    )


def _check_export(config: RunConfig, start: StartPoint, stages: list[Stage | Action]) -> None:
    """Refuse an export that would be misread or replace something else, before the training."""
    if "export" not in config.stage.run:
        return
    options, spec = config.stage.export, config.method.spec()
    target_cr = max(start.state.target_cr, config.stage.retrofit.target_cr)
    check_folder(Path(config.run.dir) / "exports", options, target_cr)
    trained = [stage for stage in stages if isinstance(stage, Stage)]
    borrows = any(stage.borrows_lane or stage.hands_over for stage in trained)
    compresses = borrows or start.state.lane_borrowed
    check_validation(config, start, compresses=compresses)
    if compresses:
        params_dtype = config.parallel.params_dtype
        check_format(options, spec, start.architecture, params_dtype, target_cr)


def _run(prepared: _Prepared, view: ParallelView) -> None:
    config = prepared.config
    leads = view.rank == 0
    _agree(prepared, view)
    engine = _build_engine(prepared, view)
    state = prepared.start.state
    train, valid = _datasets(prepared, view)
    source, eval_batches = _batches(config, view, train, valid)
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
    validator = ModelValidator(
        folder=prepared.folder,
        teacher=prepared.start.model_dir,
        samples=valid,
        options=config.stage.validate,
        since=prepared.since,
    )
    reporter = _reporter(prepared, state, view)
    try:
        loop.run(
            prepared.stages,
            state,
            LoopParts(
                engine=engine,
                source=source,
                exporter=exporter,
                validator=validator,
                reporter=reporter,
                options=config.run,
                checkpoints=prepared.folder / "checkpoints",
                leads=leads,
                global_batch_size=config.data.global_batch_size,
                eval_batches=eval_batches,
                every_integer_cr=_exports_integers(config),
                provenance=provenance,
            ),
        )
    finally:
        reporter.close()


def _exports_integers(config: RunConfig) -> bool:
    return "export" in config.stage.run and config.stage.export.every_integer_cr


def _agree(prepared: _Prepared, view: ParallelView) -> None:
    """All ranks must have found the same place to start from; they looked for themselves."""
    start = prepared.start
    mine = (str(start.student), start.state.to_dict())
    if groups.value_of_rank_0(mine) != mine:
        raise ConfigError(
            f"rank {view.rank}: sees {start.student} as the place to start from, rank 0 another "
            f"one; all ranks must see the same run.dir={prepared.folder}"
        )


def _build_engine(prepared: _Prepared, view: ParallelView) -> McoreEngine:
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
    remaining = prepared.stages[start.state.stage :]
    if original is not None and any(
        isinstance(s, Stage) and s.loss == "distill" for s in remaining
    ):
        engine.attach_teacher(original)
    load_start(engine, start)
    return engine


def _datasets(
    prepared: _Prepared, view: ParallelView
) -> tuple[TokenSamples | None, TokenSamples | None]:
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


def _batches(
    config: RunConfig,
    view: ParallelView,
    train: TokenSamples | None,
    valid: TokenSamples | None,
) -> tuple[BatchSource, list[Any]]:
    def source(samples: TokenSamples, size: int) -> BatchSource:
        return BatchSource(
            samples,
            micro_batch_size=config.data.micro_batch_size,
            global_batch_size=size,
            data_parallel_rank=view.dp_rank,
            data_parallel_size=view.dp_size,
        )

    assert train is not None
    evaluation = [] if valid is None else source(valid, len(valid)).microbatches(0)
    return source(train, config.data.global_batch_size), evaluation


def _selftest_tokens(samples: TokenSamples | None, config: RunConfig) -> torch.Tensor:
    """A real text of the data, the first sample of the validation split if there is one."""
    assert samples is not None
    wanted = config.method.spec().window + _SELFTEST_TOKENS
    shards = config.parallel.tensor_model_parallel_size
    return samples[0].tokens[: min(config.data.seq_length, -(-wanted // shards) * shards)]


def _reporter(prepared: _Prepared, state: TrainState, view: ParallelView) -> Reporter:
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
