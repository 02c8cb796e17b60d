"""The run folder: its resolved configuration, and where a started run continues."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from dms_train.app import launcher
from dms_train.app.frozen_base import stored_base
from dms_train.app.start_point import (
    StartPoint,
    as_override,
    described_model,
    with_known_channel,
)
from dms_train.config.build import ConfigError, to_mapping
from dms_train.config.frozen import CONFIG_FILE, require_same
from dms_train.config.schema import RunConfig
from dms_train.mcore import groups
from dms_train.mcore.checkpoints import reading as checkpoint
from dms_train.mcore.checkpoints.state import STATE_FILE, read_state
from dms_train.mcore.errors import DamagedError
from dms_train.mcore.groups import ParallelView
from dms_train.method.base import MethodSpec
from dms_train.observe import locks
from dms_train.observe.log import logger
from dms_train.observe.state_files import StateFiles
from dms_train.training.state import TrainState


def mapping(config: RunConfig) -> dict[str, Any]:
    """Return the resolved configuration as plain values."""
    return to_mapping(config)


def resume_point(
    config: RunConfig, start: StartPoint, before: str | None = None
) -> StartPoint | None:
    """Move `start` to the newest whole checkpoint of this run folder; None if it has none.

    Args:
        config: Configuration of the run.
        start: Start of the run without checkpoints.
        before: Take only checkpoints older than the one of this name.

    Raises:
        ConfigError: The folder or its checkpoint does not fit: another configuration or other
            constants of the method. Or resuming was not requested, or no checkpoint is
            usable.
        CheckpointError: The newest whole checkpoint was not written by this program.
    """
    folder = Path(config.run.dir)
    newest, passed = checkpoint.newest(folder / "checkpoints", before)
    if newest is None and passed:
        raise ConfigError(
            f"run.dir={folder}: none of its {len(passed)} checkpoint(s) can be used "
            f"({passed[0].rpartition('; ')[0]}); choose another folder to start again"
        )
    if newest is None:
        return None
    for reason in passed:
        logger().warning("skipped: %s", reason)
    if config.run.resume == "never":
        raise ConfigError(
            f"run.dir={folder}: it holds {newest.name} and run.resume=never; choose another folder"
        )
    require_same(config, folder / CONFIG_FILE)
    stored = read_state(newest)
    _, spec = described_model(newest, stored)
    _require_same_method(config, newest, spec)
    state = TrainState.from_dict(stored)
    logger().info("resuming from %s", newest)
    base = stored_base(stored)
    return replace(start, student=newest, spec=spec, state=state, resumes=True, adapter_base=base)


def _require_same_method(config: RunConfig, path: Path, trained: MethodSpec) -> None:
    """Refuse to resume a checkpoint with other constants of the method than it was trained with."""
    configured, stored = asdict(with_known_channel(config.method, trained)), asdict(trained)
    if config.method.kind != trained.kind:
        raise ConfigError(
            f"method={config.method.preset}: {path} was trained with method={trained.preset}; "
            "write that, or choose another run.dir"
        )
    differing = [key for key in stored if configured[key] != stored[key]]
    if differing:
        raise ConfigError(
            *(
                f"method.{key}={as_override(configured[key])}: {path} was trained with "
                f"{as_override(stored[key])}; write method.{key}={as_override(stored[key])}, or "
                "choose another run.dir"
                for key in differing
            )
        )


def verified(config: RunConfig, start: StartPoint, view: ParallelView) -> StartPoint:
    """Return `start` if its checksums hold, else the newest older checkpoint with valid checksums.

    All ranks call it: each reads a share of the files, and all get the same answer. Ranks that
    found different checkpoints of the run go back to the oldest of them.

    Raises:
        ConfigError: No checkpoint of the run is left, or the ranks see different folders.
        CheckpointError: The checkpoint that `run.load` names has changed since it was written.
    """
    if all(groups.values(start.resumes)):
        start = _same_on_all_ranks(config, start)
    _require_same_start(config, start, view)
    while groups.value_of_rank_0(_is_checkpoint(start)):
        assert start.student is not None
        try:
            checkpoint.verify(start.student, view)
            break
        except DamagedError as error:
            if not start.resumes:
                raise
            if view.rank == 0:
                logger().warning("skipped: %s", error)
            older = _older(config, start, str(error))
            start = _same_on_all_ranks(config, older)
    _require_same_start(config, start, view)
    return start


def _require_same_start(config: RunConfig, start: StartPoint, view: ParallelView) -> None:
    """Fail unless all ranks found the same checkpoint; each rank searches on its own."""
    seen = groups.values((str(start.student), start.state.to_dict()))
    differing = next((rank for rank, other in enumerate(seen) if other != seen[0]), None)
    if differing is not None:
        raise ConfigError(
            f"rank {differing}: sees {seen[differing][0]} as the place to start from, rank 0 "
            f"{seen[0][0]}; all ranks must see the same run.dir={config.run.dir}"
        )


def set_aside(start: StartPoint, *, is_main_rank: bool) -> None:
    """Rename newer checkpoints that a resumed run skipped, so that none counts as kept.

    All ranks call it after `verified`. One rank renames, and the others wait for it.
    """
    if start.resumes and is_main_rank:
        assert start.student is not None
        for path in start.student.parent.glob("step_????????"):
            if path.name > start.student.name:
                _set_aside(path)
    groups.value_of_rank_0(None)


def _set_aside(path: Path) -> None:
    aside = path.with_name(f"{path.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
    try:
        path.rename(aside)
    except OSError as error:
        logger().warning("%s: cannot be renamed (%s)", path, error.strerror)
    else:
        logger().info("renamed %s to %s", path, aside.name)


def _is_checkpoint(start: StartPoint) -> bool:
    if start.student is None:
        return False
    return start.resumes or (start.student / STATE_FILE).is_file()


def _older(config: RunConfig, start: StartPoint, why: str) -> StartPoint | ConfigError:
    """Return the newest checkpoint before `start` on this rank, or the error if there is none."""
    assert start.student is not None
    try:
        older = resume_point(config, start, before=start.student.name)
    except ConfigError as error:
        return error
    except ValueError as error:
        return ConfigError(str(error))
    return older or ConfigError(
        f"run.dir={config.run.dir}: none of its checkpoints can be used "
        f"({why.rpartition('; ')[0]}); choose another folder to start again"
    )


def _same_on_all_ranks(config: RunConfig, start: StartPoint | ConfigError) -> StartPoint:
    """Return the oldest checkpoint that any rank found; an error on one rank is raised on all."""
    while True:
        for refused in groups.values(start if isinstance(start, ConfigError) else None):
            if refused is not None:
                raise refused
        assert isinstance(start, StartPoint)
        assert start.student is not None
        names = groups.values(start.student.name)
        if min(names) == max(names):
            return start
        if start.student.name != min(names):
            why = f"checkpoint {start.student}: another rank cannot use it; use an older checkpoint"
            logger().warning("skipped: %s", why)
            start = _older(config, start, why)


def write(config: RunConfig, *, is_main_rank: bool) -> None:
    """Make the folder and store the resolved configuration; ConfigError when that fails."""
    if not is_main_rank:
        return
    folder = Path(config.run.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # replaced in one step: another rank may be reading the old one
        scratch = folder / f"{CONFIG_FILE}.partial"
        scratch.write_text(yaml.safe_dump(mapping(config), sort_keys=False))
        scratch.replace(folder / CONFIG_FILE)
    except OSError as error:
        raise _unwritable(folder, error) from error


def require_unchanged(config: RunConfig, start: StartPoint) -> None:
    """Refuse a folder whose newest checkpoint is not the one that was prepared.

    Raises:
        ConfigError: Another run wrote to the folder before this one locked it.
    """
    newest, _ = checkpoint.newest(Path(config.run.dir) / "checkpoints")
    if newest != (start.student if start.resumes else None):
        raise ConfigError(
            f"run.dir={config.run.dir}: another run wrote to it in the meantime; start again"
        )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a run folder inside the block, so that no other run or job writes it.

    Raises:
        LockedError: Another process holds the lock.
        ConfigError: The folder cannot be written.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(
                locks.held(StateFiles(folder).lock, f"run.dir={folder}", launcher.job())
            )
        except OSError as error:
            raise _unwritable(folder, error) from error
        yield


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.dir={folder}: cannot be written ({error.strerror}); choose another folder"
    )
