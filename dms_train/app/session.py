"""Execution of a run: check the configuration, build the objects, run the stages."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path

import torch

from dms_train.app import failures, inputs, launcher, run_folder, teacher_logits
from dms_train.app.channel_choice import choose_channel
from dms_train.app.components import trainer_components
from dms_train.app.engine import build_engine
from dms_train.app.memory_check import check_memory
from dms_train.app.plan import describe
from dms_train.app.preparation import Prepared, prepare
from dms_train.app.start_point import with_known_channel
from dms_train.app.teacher_check import TeacherError, check_teacher
from dms_train.app.watch import RunWatch, end_hanging_run
from dms_train.config.build import ConfigError
from dms_train.config.schema import RunConfig
from dms_train.kernels import dispatch
from dms_train.mcore import groups
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers import backend as layers
from dms_train.mcore.schedule import graph
from dms_train.observe import log
from dms_train.observe.heartbeats import Heartbeats
from dms_train.observe.locks import LockedError
from dms_train.observe.state_files import StateFiles
from dms_train.training import loop
from dms_train.training.errors import KLLimitError
from dms_train.training.state import TrainState

# Refusals of a run that has begun. Every start ends in them, on every rank.
_LATE_REFUSALS = (TeacherError, KLLimitError)


def run(config: RunConfig, until: str | None = None) -> None:
    """Run the stages of a configuration, after checking it.

    Args:
        config: Configuration of the run.
        until: Stop after this stage of `stage.run`; None runs all.

    Raises:
        ConfigError: Before anything is allocated, one line for each problem.
        ValueError: A package refused its input.
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
    """Record for the launch scripts why this rank ends, and whether a retry can succeed."""
    attempt, lines = launcher.attempt(), failures.describe(error)
    if attempt is None:
        return
    if isinstance(error, LockedError):
        return  # the folder belongs to another process
    with contextlib.suppress(OSError):  # such as the full disk that is reported
        files.failed(launcher.rank(), attempt, error, lines)
        refuses = isinstance(error, _LATE_REFUSALS) or (not begun and failures.is_refusal(error))
        if refuses and launcher.rank() == 0:
            files.refused(lines)


def _stage_count(config: RunConfig, until: str | None) -> int:
    """Return the number of entries of `stage.run` to run."""
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
            start = prepared.start
            config = replace(config, method=with_known_channel(config.method, start.spec))
            ratio = start.state.loaded_cr
            text = describe(config, prepared.architecture, launcher.world_size(), ratio)
            sys.stdout.write(f"{text}\ndry run: nothing was started\n")
        return
    if prepared.start.state.stage >= count:
        log.logger().info("nothing left to do: %s is finished", config.run.dir)
        _say_done(prepared, prepared.start.state, files)
        return
    _announce_kernels(config)
    # one rank holds the lock; the others start with it, or end with it
    main = launcher.rank() == 0
    with run_folder.held(Path(config.run.dir)) if main else contextlib.nullcontext():
        if main:
            run_folder.require_unchanged(config, prepared.start)
        _begin(prepared, count, files)


def _begin(prepared: Prepared, count: int, files: StateFiles) -> None:
    """Start the process groups and run the stages that are left."""
    config = prepared.config
    run_folder.write(config, is_main_rank=launcher.rank() == 0)
    view = groups.start(config.parallel, config.run.seed)
    check_memory(
        config, prepared.architecture, view, validates="validate_export" in config.stage.run[:count]
    )
    if view.rank == 0:
        files.begin()
    watch = RunWatch(files, view, _heartbeats(config, view, files))
    watch.listen()
    try:
        state = _run(prepared, view, watch, count)
    except RuntimeError as error:
        if failures.lost_peer(error):
            raise failures.PeerLost(
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
        # earlier than the collectives' timeout, whose error does not name the missing rank
        patience=config.parallel.distributed_timeout_minutes * 60 / 2,
        hang=end_hanging_run(files),
    )


def _say_done(prepared: Prepared, state: TrainState, files: StateFiles) -> None:
    """Write the state files of finished stages; a killed process may have left them out."""
    if launcher.rank() != 0:
        return
    names = prepared.config.stage.run
    for name in names[: state.stage]:
        files.done(name, state.step)
    if state.stage >= len(names):
        files.all_done()


def _announce_kernels(config: RunConfig) -> None:
    """Refuse a backend that cannot train on this machine; log the one that is used."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers.choose(
        config.parallel.layers,
        device,
        adapts=config.trainable.adapts,
        overlaps=config.parallel.tp_comm_overlap,
        fp8=config.parallel.fp8,
    )
    if config.parallel.cuda_graph == "always":
        graph.require_gpu(device)
    decays = config.method.decays
    name = dispatch.choose_train_attention(config.kernels, device, decays=decays)
    log.logger().info("attention: %s kernels on %s", name, device.type.upper())


def _run(prepared: Prepared, view: ParallelView, watch: RunWatch, count: int) -> TrainState:
    """Run the first `count` stages and return the position of the run after them."""
    config = prepared.config
    is_main_rank = view.rank == 0
    prepared = replace(prepared, start=run_folder.verified(config, prepared.start, view))
    inputs.verify_data(config.data.paths, view)
    contents = inputs.record(config.data.paths, prepared.start.model_dir, view)
    inputs.require_same_weights(contents, prepared.start)
    teacher_logits.check(config, prepared.architecture, prepared.steps, contents)
    run_folder.set_aside(prepared.start, is_main_rank=is_main_rank)
    engine = build_engine(prepared, view)
    components = trainer_components(prepared, view, engine, watch, contents)
    # closing the sinks, which may still send rows, must not delay another rank
    with contextlib.closing(components.reporter), watch.expecting_ranks(engine):
        check_teacher(prepared, engine, components.source)
        choose_channel(prepared, view, engine, components.source)
        return loop.run(prepared.stages[:count], prepared.start.state, components)
