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
from dms_train.observe.log import logger
from dms_train.training.state import TrainState


def mapping(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as plain values."""
    return to_mapping(config)


def resume_point(config: RunConfig, start: StartPoint) -> StartPoint | None:
    """`start` moved to the newest valid checkpoint of this run folder; None when it has none.

    Raises:
        ConfigError: The folder belongs to a run with another configuration, resuming was not
            asked for, or no checkpoint is usable.
        CheckpointError: The newest whole checkpoint was not written by this program.
    """
    folder = Path(config.run.dir)
    newest, passed = checkpoint.newest(folder / "checkpoints")
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
    state = TrainState.from_dict(checkpoint.check(newest))
    logger().info("resuming from %s", newest)
    return replace(start, student=newest, spec=None, state=state, resumes=True)


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
