"""Adapter in PEFT's format beside its base model, with configuration and code of format `dms`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dms_train.hf.formats.base import ExportedModel, ExportFormat, Stated, read_block
from dms_train.hf.formats.nested import nested_keys
from dms_train.hf.side_files import is_adapter
from dms_train.hf.stored import stored_parts


def _problem(model: ExportedModel) -> str | None:
    if model.adapter_base is None:
        return (
            "no base model is recorded whose weights stayed as they are; train with "
            "method.train=lora or channel, from model.path and without a Hugging Face directory as "
            "run.load"
        )
    if stored_parts(model.architecture):
        family = model.architecture.family
        return (
            f"{family} files join projections or order channels in another way; merge the adapter"
        )
    base = model.adapter_base.name
    if Path(base).is_file() or base.endswith(".gguf"):
        return (
            f"neither PEFT nor transformers can load the base model {base}; train from the "
            "directory that dms-import makes of it"
        )
    return None


def _read(directory: Path, config: dict[str, Any], decision_projection: bool) -> Stated | None:
    return read_block(directory, config, "dms") if is_adapter(directory) else None


FORMAT = ExportFormat(
    name="peft",
    consumer="PEFT",
    preset=None,
    config_keys=nested_keys,
    problem=_problem,
    read=_read,
)
