"""This project's own format: the whole specification under one key, `dms`, of config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dms_train.hf.formats.base import (
    ExportedModel,
    ExportFormat,
    Stated,
    modeling_keys,
    read_block,
)


def _config_keys(model: ExportedModel) -> dict[str, Any]:
    """One nested key, and a model_type that is not registered in transformers."""
    family = model.architecture.family
    return {
        **modeling_keys(family),
        "model_type": f"dms_{family}",
        "rope_scaling": None,  # stated in rope_parameters alone, see the shipped configuration
        "dms": {
            "spec": model.spec.to_dict(),
            "cr_factor": model.cr_factor,
            "target_cr": model.target_cr,
        },
    }


def _read(directory: Path, config: dict[str, Any], adapter: bool) -> Stated | None:
    return read_block(directory, config, "dms")


FORMAT = ExportFormat(
    name="dms", consumer="this project", preset="dms", config_keys=_config_keys, read=_read
)
