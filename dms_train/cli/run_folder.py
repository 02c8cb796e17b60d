"""The run folder: its resolved configuration, and where a started run continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from dms_train.cli.start_point import StartPoint
from dms_train.config.build import ConfigError, to_mapping
from dms_train.config.frozen import CONFIG_FILE, require_same
from dms_train.config.schema import RunConfig
from dms_train.mcore import checkpoint
from dms_train.mcore.checkpoint_state import STATE_FILE, read_state
from dms_train.mcore.errors import DamagedError
from dms_train.mcore.groups import ParallelView
from dms_train.observe.log import logger
from dms_train.training.state import TrainState


def mapping(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as plain values."""
    return to_mapping(config)


def resume_point(
    config: RunConfig, start: StartPoint, before: str | None = None
) -> StartPoint | None:
    """`start` moved to the newest whole checkpoint of this run folder; None when it has none.

    Args:
        config: Of the run.
        start: Where it starts without checkpoints.
        before: Take only checkpoints older than the one of this name.

    Raises:
        ConfigError: The folder belongs to a run with another configuration, resuming was not
            asked for, or no checkpoint is usable.
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
    state = TrainState.from_dict(read_state(newest))
    logger().info("resuming from %s", newest)
    return replace(start, student=newest, spec=None, state=state, resumes=True)


def verified(config: RunConfig, start: StartPoint, view: ParallelView) -> StartPoint:
    """`start` after comparing checksums, or the newest older checkpoint whose checksums hold.

    All ranks call it: each reads a share of the files, and all hear the same answer.

    Raises:
        ConfigError: No checkpoint of the run is left.
        CheckpointError: The checkpoint that `run.load` names has changed since it was written.
    """
    while start.student is not None and (start.student / STATE_FILE).is_file():
        try:
            checkpoint.verify(start.student, view)
            break
        except DamagedError as error:
            if not start.resumes:
                raise
            if view.rank == 0:
                logger().warning("skipped: %s", error)
            older = resume_point(config, start, before=start.student.name)
            if older is None:
                raise ConfigError(
                    f"run.dir={config.run.dir}: none of its checkpoints can be used "
                    f"({str(error).rpartition('; ')[0]}); choose another folder to start again"
                ) from error
            start = older
    return start


def write(config: RunConfig, *, leads: bool) -> None:
    """Make the folder and store the resolved configuration; ConfigError when that fails."""
    if not leads:
        return
    folder = Path(config.run.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # replaced in one step: another rank may be reading the old one
        scratch = folder / f"{CONFIG_FILE}.partial"
        scratch.write_text(yaml.safe_dump(mapping(config), sort_keys=False))
        scratch.replace(folder / CONFIG_FILE)
    except OSError as error:
        raise ConfigError(
            f"run.dir={folder}: cannot be written ({error.strerror}); choose another folder"
        ) from error
