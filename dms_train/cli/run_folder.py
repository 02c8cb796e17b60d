"""The run folder: its resolved configuration, and where a started run continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from dms_train.cli.start_point import StartPoint
from dms_train.config.build import ConfigError, to_mapping
from dms_train.config.schema import RunConfig
from dms_train.mcore import checkpoint
from dms_train.observe.log import logger
from dms_train.training.state import TrainState

CONFIG_FILE = "config.yaml"
# What may change between the parts of one run: it moves no sample, weight or decision.
_FREE = ("observe", "kernels", "stage.validate", "data.micro_batch_size", "data.cache_dir")


def mapping(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as plain values."""
    return to_mapping(config)


def _fixed(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Flat view of the keys that a resumed run must not change."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        here = f"{path}.{key}" if path else key
        if here in _FREE:
            continue
        if here == "run":
            flat["run.seed"] = value["seed"]
        elif here == "parallel":
            flat["parallel.params_dtype"] = value["params_dtype"]
        elif isinstance(value, dict):
            flat |= _fixed(value, here)
        else:
            flat[here] = value
    return flat


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
    _require_same(config, folder / CONFIG_FILE)
    state = TrainState.from_dict(checkpoint.check(newest))
    logger().info("resuming from %s", newest)
    return replace(start, student=newest, spec=None, state=state, resumes=True)


def _require_same(config: RunConfig, file: Path) -> None:
    if not file.is_file():
        return
    before, now = _fixed(yaml.safe_load(file.read_text())), _fixed(mapping(config))
    differing = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
    if differing:
        shown = ", ".join(f"{k}: {before.get(k)} -> {now.get(k)}" for k in differing[:5])
        raise ConfigError(
            f"run.dir={file.parent}: its run was started with other values ({shown}); "
            "restore them or choose another folder"
        )


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
