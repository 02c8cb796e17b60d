"""The FastDMS engine: Llama and Qwen3, shift 0, the channel cleared once.

Its trainer keeps the config.json of the dense model and writes `training_log.json` into the parent
folder. Its engine first reads `dms_metadata.json` next to the weights, if there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dms_train.hf.formats import flat
from dms_train.hf.formats.base import ExportedModel, ExportFormat, Stated
from dms_train.hf.json_files import read_json
from dms_train.hf.values import Values
from dms_train.method.spec import PRESETS

LOG_FILE = "training_log.json"
_SETTINGS = ("window_size", "alpha_scale", "alpha_offset")
_SMALLEST_HEAD = 32  # limit of its inline RoPE kernel
_PRESET = "dms_fastdms"
_LIMITS = flat.Limits(
    families=("qwen3", "llama"),
    decision_shift=0,
    clear_after_rope=False,
    max_group=8,
    max_head_size=128,
)


def _advice(model: ExportedModel) -> list[str]:
    advice = flat.rounding_advice(model)
    advice.append("FastDMS attends densely inside the prompt; training masked it")
    if model.architecture.kv_channels < _SMALLEST_HEAD:
        advice.append(
            f"head size below {_SMALLEST_HEAD}: FastDMS' inline RoPE kernel does not take it"
        )
    return advice


def _read(directory: Path, config: dict[str, Any], decision_projection: bool) -> Stated | None:
    """Read flat keys with shift 0, or settings outside config.json."""
    if "dms" in config:
        return None
    shift = flat.flat_shift(config)
    if shift == 0:
        return flat.read_flat(
            directory, config, PRESETS[_PRESET].spec, decision_projection=decision_projection
        )
    return _stated(directory) if shift is None else None


def _stated(directory: Path) -> Stated | None:
    """Read the settings of a checkpoint whose config.json has none."""
    path, values = _settings(directory)
    if not values:
        return None
    config = Values(f"{path}: config", values)
    spec = PRESETS[_PRESET].spec.override(
        window=config.whole("window_size"),
        alpha_scale=config.positive("alpha_scale"),
        alpha_offset=config.number("alpha_offset"),
    )
    ratio = config.positive_or_none("target_cr")
    return Stated(spec=spec, target_cr=1.0 if ratio is None else ratio, cr_factor=None)


def _settings(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Find the first file with DMS settings; files of other programs are ignored."""
    here = directory.resolve()
    for path in (here / flat.METADATA_FILE, here.parent / LOG_FILE):
        values = (read_json(path) if path.is_file() else {}).get("config")
        if isinstance(values, dict) and all(key in values for key in _SETTINGS):
            return path, values
    return here, {}


FORMAT = ExportFormat(
    name="fastdms",
    consumer="FastDMS",
    preset=_PRESET,
    dtype=flat.DTYPE,
    config_keys=flat.config_keys,
    json_files=flat.metadata_file,
    problem=_LIMITS.problem,
    advice=_advice,
    read=_read,
)
