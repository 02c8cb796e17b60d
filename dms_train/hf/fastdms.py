"""What FastDMS states about a checkpoint outside config.json.

Its trainer leaves config.json as that of the dense model and writes `training_log.json` into the
folder above; its engine also reads `dms_metadata.json` beside the weights, and reads that first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dms_train.hf.directory import read_json
from dms_train.hf.errors import HFError
from dms_train.method.spec import PRESETS, DMSSpec

METADATA_FILE = "dms_metadata.json"
LOG_FILE = "training_log.json"
_SETTINGS = ("window_size", "alpha_scale", "alpha_offset")


def stated_spec(directory: Path) -> DMSSpec | None:
    """The specification of a checkpoint whose config.json states none; None if nothing does.

    Raises:
        HFError: The values are not those of a specification.
    """
    path, values = _stated(directory)
    if not values:
        return None
    window, scale, offset = (values[key] for key in _SETTINGS)
    base = PRESETS["dms_fastdms"]
    try:
        return base.override(window=window, alpha_scale=scale, alpha_offset=offset)
    except (TypeError, ValueError) as error:
        raise HFError(f"{path}: {error}; correct the file") from None


def stated_cr(directory: Path) -> float:
    """The compression ratio such a checkpoint was trained for; 1 if nothing says so."""
    return float(_stated(directory)[1].get("target_cr") or 1.0)


def _stated(directory: Path) -> tuple[Path, dict[str, Any]]:
    """The file that speaks and its settings; other programs' files of these names say nothing."""
    here = directory.resolve()
    for path in (here / METADATA_FILE, here.parent / LOG_FILE):
        values = (read_json(path) if path.is_file() else {}).get("config")
        if isinstance(values, dict) and all(key in values for key in _SETTINGS):
            return path, values
    return here, {}
