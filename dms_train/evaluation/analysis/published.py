"""Numbers that the DMS paper prints, for comparison; nothing here was measured by this project."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

SOURCE = "Lancucki et al., Inference-Time Hyper-Scaling with KV Cache Compression (2025)"
_FILE = "assets/published_dms.json"


@cache
def published() -> dict[str, dict[str, Any]]:
    """Return tables by name: `caption`, `columns`, and `rows` of a label and cells (None is NA)."""
    text = files("dms_train").joinpath(_FILE).read_text(encoding="utf-8")
    tables: dict[str, dict[str, Any]] = json.loads(text)
    return tables
