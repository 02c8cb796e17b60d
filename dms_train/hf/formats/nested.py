"""Formats of this project: the whole specification under one key of config.json.

Every method has one. The key and the format have the name of the method.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dms_train.hf.formats.base import ExportedModel, ExportFormat, Stated, read_block
from dms_train.hf.side_files import is_adapter
from dms_train.hf.stored import file_channel


def nested_format(method: str) -> ExportFormat:
    """Describe the format of a method's exports."""

    def read(directory: Path, config: dict[str, Any], decision_projection: bool) -> Stated | None:
        return None if is_adapter(directory) else read_block(directory, config, method)

    return ExportFormat(
        name=method,
        consumer="this project",
        method=method,
        preset=method,
        config_keys=nested_keys,
        read=read,
    )


def nested_keys(model: ExportedModel) -> dict[str, Any]:
    """Set one nested key, and a model_type that is not registered in transformers."""
    method, channel = model.spec.kind, model.spec.channel
    in_files = file_channel(model.architecture, channel)
    return {
        "model_type": f"{method}_{model.architecture.family}",
        "rope_scaling": None,  # stated in rope_parameters alone, see the shipped configuration
        method: {
            "spec": model.spec.to_dict(),
            "cr_factor": model.cr_factor,
            "target_cr": model.target_cr,
            **({} if in_files == channel else {"file_channel": in_files}),
        },
    }
