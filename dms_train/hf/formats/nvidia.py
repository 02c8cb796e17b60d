"""NVIDIA's public DMS code: Qwen3, shift 1, the channel cleared again after RoPE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dms_train.hf.formats import flat
from dms_train.hf.formats.base import ExportedModel, ExportFormat, Stated
from dms_train.method.spec import PRESETS

# FlashAttention-2's paged kernel takes page sizes that are multiples of this many tokens.
_PAGE_MULTIPLE = 256
_PRESET = "dms_nvidia"
_LIMITS = flat.Limits(families=("qwen3",), decision_shift=1, clear_after_rope=True)


def _problem(model: ExportedModel) -> str | None:
    problem = _LIMITS.problem(model)
    if problem is None and model.spec.window <= model.block_size:
        return (
            f"method.window={model.spec.window}: it needs a window larger than the cache page of "
            f"{model.block_size} tokens; train with a larger window or export a smaller block_size"
        )
    return problem


def _advice(model: ExportedModel) -> list[str]:
    advice = flat.rounding_advice(model)
    if model.block_size % _PAGE_MULTIPLE:
        advice.append(
            f"block_size {model.block_size}: FlashAttention-2 needs a multiple of {_PAGE_MULTIPLE}"
        )
    return advice


def _read(directory: Path, config: dict[str, Any], decision_projection: bool) -> Stated | None:
    """Read flat keys with any shift except 0, which is FastDMS; without a shift it is 1."""
    if flat.flat_shift(config) in (None, 0):
        return None
    return flat.read_flat(
        directory, config, PRESETS[_PRESET].spec, decision_projection=decision_projection
    )


FORMAT = ExportFormat(
    name="nvidia",
    consumer="NVIDIA's DMS code",
    preset=_PRESET,
    dtype=flat.DTYPE,
    config_keys=flat.config_keys,
    json_files=flat.metadata_file,
    problem=_problem,
    advice=_advice,
    read=_read,
)
