"""JSON files of model directories: one clear error each, written whole. No torch needed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dms_train.hf.errors import HFError
from dms_train.hf.text_files import refuse_pointer
from dms_train.hf.typed import typed


@typed
def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object; one-line FileNotFoundError or ValueError naming the file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    refuse_pointer(path, data)
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise HFError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise HFError(f"{path}: expected a JSON object, found {json.dumps(value)[:40]}")
    return value


@typed
def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object atomically, with indentation."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


@typed
def read_config(directory: str | Path) -> dict[str, Any]:
    """Parse `config.json` of a model directory; clear errors when it is missing or broken."""
    return read_json(Path(directory) / "config.json")
