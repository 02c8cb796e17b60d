"""Records of benchmarks that were stored, printed again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dms_train.evaluation.errors import EvaluationError


def show(path: Path, text: Callable[[Any], str]) -> int:
    """Print a stored record; 0.

    Args:
        path: JSON file.
        text: Makes what is printed of the record.

    Raises:
        EvaluationError: The file holds something else.
    """
    refused = EvaluationError(f"{path}: not a record of this command")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise refused from None
    try:
        print(text(record))
    except (KeyError, TypeError, AttributeError):
        raise refused from None
    return 0
