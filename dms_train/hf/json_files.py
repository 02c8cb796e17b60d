"""JSON files of model directories: one clear error each, written whole. No torch needed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dms_train.families import FAMILIES
from dms_train.hf.errors import HFError
from dms_train.hf.text_files import refuse_pointer
from dms_train.hf.typed import typed

_PARTS = ("text_config", "vision_config")  # parts of a model with a vision tower


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
    """Parse `config.json` of a model directory; clear errors when it is missing or broken.

    Of a model with a vision tower whose language model is supported, return the keys of the latter.
    """
    path = Path(directory) / "config.json"
    config = read_json(path)
    kinds = {family.multimodal: family.name for family in FAMILIES.values() if family.multimodal}
    kind, text = config.get("model_type"), config.get("text_config")
    if not isinstance(kind, str) or kind not in kinds:
        return config
    if not isinstance(text, dict):
        raise HFError(f"{path}: text_config={text!r}: state the keys of the language model")
    outer = {key: value for key, value in config.items() if key not in _PARTS}
    # transformers ties the output layer as the whole model states, by default not
    tied = config.get("tie_word_embeddings", False)
    return {**outer, **text, "tie_word_embeddings": tied, "model_type": kinds[kind]}
