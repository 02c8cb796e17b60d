"""This project's format for Dynamic Memory Compression: the specification under the key `dmc`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dms_train.families import FAMILIES
from dms_train.hf.formats.base import ExportedModel, ExportFormat, Stated, read_block


def _config_keys(model: ExportedModel) -> dict[str, Any]:
    """One nested key, and a model_type that is not registered in transformers."""
    family = model.architecture.family
    classes = FAMILIES[family].classes
    return {
        "architectures": [f"{classes}ForCausalLMDMC"],
        "use_cache": True,
        "auto_map": {
            "AutoConfig": f"configuration_{family}_dmc.{classes}ConfigDMC",
            "AutoModelForCausalLM": f"modeling_{family}_dmc.{classes}ForCausalLMDMC",
        },
        "model_type": f"dmc_{family}",
        "rope_scaling": None,  # stated in rope_parameters alone, see the shipped configuration
        "dmc": {
            "spec": model.spec.to_dict(),
            "cr_factor": model.cr_factor,
            "target_cr": model.target_cr,
        },
    }


def _code(family: str) -> dict[str, str]:
    return {f"{stem}_{family}_dmc.py": f"{stem}_dmc.py" for stem in ("configuration", "modeling")}


def _read(directory: Path, config: dict[str, Any], adapter: bool) -> Stated | None:
    return read_block(directory, config, "dmc")


FORMAT = ExportFormat(
    name="dmc",
    consumer="this project",
    method="dmc",
    preset="dmc",
    config_keys=_config_keys,
    code_files=_code,
    ships_cache=False,
    read=_read,
)
