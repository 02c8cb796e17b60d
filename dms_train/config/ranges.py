"""Check each value of a configuration on its own.

Limits stand next to the options of each package. This module adds those that need several packages.
"""

from __future__ import annotations

from collections.abc import Iterator

from dms_train import limits
from dms_train.config.schema import RunConfig
from dms_train.families import FAMILIES
from dms_train.hf.architecture import Architecture
from dms_train.hf.formats import FORMATS
from dms_train.limits import OneOf
from dms_train.mcore.options import EXACT_PARTS
from dms_train.method.eviction_stats import EVICTION_STATS
from dms_train.method.spec import PRESETS

_EVICTION_STATS_ROW = EVICTION_STATS * EXACT_PARTS


def check_ranges(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    """Yield one line for every value that is out of its range.

    Args:
        config: The configuration.
        architecture: The model's, read from `model.path` or taken from `model.architecture`.
    """
    yield from limits.problems(config)
    if config.model.architecture is None:
        yield from limits.problems(architecture, "model.architecture")
    if architecture.hidden_size < _EVICTION_STATS_ROW:
        yield (
            f"model.architecture.hidden_size={architecture.hidden_size}: "
            f"use at least {_EVICTION_STATS_ROW}; "
            "pipeline stages send eviction statistics in a row of that width"
        )
    channel, size = config.method.channel, architecture.kv_channels
    if isinstance(channel, int) and channel >= size:
        yield f"method.channel={channel}: a head has {size} channels; use at most {size - 1}"
    if len(architecture.method_layers) < architecture.num_layers and config.method.kind != "dms":
        kind = "a sliding window" if architecture.linear is None else "linear attention"
        yield f"method.kind={config.method.kind}: the model has layers with {kind}; use method=dms"
    family = FAMILIES.get(architecture.family)
    if family is not None and family.sinks and config.method.kind != "dms":
        yield (f"method.kind={config.method.kind}: the model has attention sinks; use method=dms")
    presets = OneOf(*_presets())
    refusal = presets.refusal(config.method.preset)
    if refusal is not None:
        yield f"method.preset={config.method.preset}: {refusal}"


def _presets() -> list[str]:
    """Return the presets of methods, and those that only an export format has."""
    of_formats = [layout.preset for layout in FORMATS.values() if layout.preset is not None]
    return list(dict.fromkeys([*PRESETS, *of_formats]))
