"""`model_type` of config.json, which names the family of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dms_train.families import FAMILIES
from dms_train.hf.typed import typed
from dms_train.hf.values import Values
from dms_train.method.spec import OPTIONS

_UNREAD_MIXTURES = ("qwen3_5_moe", "qwen3_5_moe_text")
_METHOD_PREFIX = re.compile(f"({'|'.join(OPTIONS)})_")


@typed
def family_of(config: Mapping[str, Any]) -> str:
    """Return the family of a config.json mapping. Exports have a prefix in their model_type.

    Raises:
        ValueError: For any other model_type.
    """
    model_type = config.get("model_type")
    family = _METHOD_PREFIX.sub("", str(model_type), count=1)
    if family not in FAMILIES:
        fix = f"use one of {', '.join(FAMILIES)}"
        if family in _UNREAD_MIXTURES:
            fix = f"experts of Qwen3.5 are not implemented; {fix}"
        raise Values("config.json", config).refusal("model_type", model_type, fix)
    return family
