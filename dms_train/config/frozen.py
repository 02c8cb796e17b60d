"""Resolved configuration in a run folder, and the values that a resumed run may change."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from dms_train.config.build import ConfigError, build, to_mapping
from dms_train.config.schema import RunConfig
from dms_train.evaluation.options import SANDBOX
from dms_train.hf.rope import RopeScaling
from dms_train.mcore.options import PLAIN_LORA
from dms_train.method.spec import DEFAULT_METHOD, KIND, PRESETS
from dms_train.observe.state_files import current_stage

CONFIG_FILE = "config.yaml"
# Keys that a resumed run may change, because they affect no sample, weight or decision. The channel
# of a resumed run is compared with its checkpoint, which has a number where this file has `auto`.
_FREE = (
    "method.channel",
    "observe",
    "cluster",
    "kernels",
    "stage.validate_export",
    "stage.run_tasks",
    "data.micro_batch_size",
    "data.cache_dir",
    "teacher.offload",
    "optim.offload",
)
# Keys of configurations that earlier versions stored, and the keys that replaced them.
_MOVED = {
    "method.kl_direction": "loss.kl_direction",
    "method.kl_temperature": "loss.kl_temperature",
    "stage.validate": "stage.validate_export",
    "stage.evaluate": "stage.run_tasks",
}


def read_frozen(file: Path) -> RunConfig:
    """Read the configuration in a run folder, also if an earlier version wrote it.

    Raises:
        ConfigError: The file is absent or cannot be used.
    """
    try:
        values = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}); give the folder of a run"
        ) from error
    except yaml.YAMLError as error:
        cause = " ".join(str(error).split())
        raise ConfigError(f"{file}: cannot be read ({cause}); restore it") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: holds no configuration")
    return build(_current(values))


def _current(values: dict[str, Any]) -> dict[str, Any]:
    """Return a stored configuration with the keys of this version; `build` refuses the rest."""
    current = copy.deepcopy(values)
    for old, new in _MOVED.items():
        (block, name), (target, new_name) = old.split("."), new.split(".")
        source = _block(current, block)
        if name in source and new_name not in _block(current, target):
            current.setdefault(target, {})
            _block(current, target)[new_name] = source.pop(name)
    _add_trained_weights(current)
    architecture = _block(_block(current, "model"), "architecture")
    if architecture:  # written when the layers of every model were alike
        architecture.setdefault("layers", [])
        if "rope_scaling" in architecture:
            architecture["rope_scaling"] = RopeScaling.completed(architecture["rope_scaling"])
    stage = _block(current, "stage")
    if isinstance(stage.get("run"), list):
        stage["run"] = [current_stage(n) if isinstance(n, str) else n for n in stage["run"]]
    tasks = _block(stage, "run_tasks")
    if isinstance(tasks.get("allow_code"), bool):  # written before there was a choice of isolation
        tasks["allow_code"] = SANDBOX if tasks["allow_code"] else None
    return current


def _add_trained_weights(current: dict[str, Any]) -> None:
    """Add the choice of trained weights, which configurations of earlier versions lack."""
    method = _block(current, "method")
    kind = method.get(KIND, DEFAULT_METHOD)
    if "train" not in method and kind in PRESETS:
        method["train"] = PRESETS[kind].train
        current.setdefault("lora", to_mapping(PLAIN_LORA))


def _block(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a block; an empty one if the value is not a mapping."""
    block = values.get(name)
    return block if isinstance(block, dict) else {}


def require_same(config: RunConfig, file: Path) -> None:
    """Refuse a configuration other than the one in `file`, which need not exist.

    Raises:
        ConfigError: One line with the first values that differ.
    """
    if not file.is_file():
        return
    before = _fixed(to_mapping(read_frozen(file)))  # with defaults for newer keys
    now = _fixed(to_mapping(config))
    written, requested = _own_rates(before), _own_rates(now)
    differing = sorted(k for k in before.keys() | now.keys() if written.get(k) != requested.get(k))
    if differing:
        shown = ", ".join(f"{k}: {before.get(k)} -> {now.get(k)}" for k in differing[:5])
        raise ConfigError(
            f"run.dir={file.parent}: its run was started with other values ({shown}); "
            "restore them or choose another folder"
        )


def _own_rates(flat: dict[str, Any]) -> dict[str, Any]:
    """Return a flat view in which stages with the common learning rate refer to `optim.lr`.

    A change of `optim.lr` is then one difference instead of one for each stage.
    """
    common = flat.get("optim.lr")
    return {
        key: "optim.lr"
        if key.startswith("stage.") and key.endswith(".lr") and value == common
        else value
        for key, value in flat.items()
    }


def _fixed(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return the flat view of the keys that a resumed run must not change."""
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
