"""Copy of a model directory's tokenizer to an export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from dms_train.hf.json_files import read_json, write_json
from dms_train.hf.tokenizer_files import MODEL_INPUTS, TOKENIZER_CONFIG, TOKENIZER_FILE

NO_TOKENIZER = (
    f"the export has no {TOKENIZER_FILE}, so it takes and returns token ids only; export it with a "
    "tokenizer, or copy the tokenizer's files into it"
)
# AutoTokenizer of transformers 4.57 to 5.23 uses tokenizer.json unchanged for this class only.
_CLASS = "PreTrainedTokenizerFast"
_COPIED = (
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory has `tokenizer.json`, which every command uses."""
    return (directory / TOKENIZER_FILE).is_file()


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy the tokenizer's files, so that AutoTokenizer gives the ids of `tokenizer.json`.

    Args:
        source: Model directory, or one with a tokenizer only.
        directory: The export.

    Raises:
        HFError: A JSON file is damaged.
    """
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    config_file = source / TOKENIZER_CONFIG
    config = read_json(config_file) if config_file.is_file() else {}
    if has_tokenizer(source):
        _copy_without_limits(source / TOKENIZER_FILE, directory / TOKENIZER_FILE)
        # an export does not hold the tokenizer code that `auto_map` names
        config = {key: value for key, value in config.items() if key != "auto_map"}
        config["tokenizer_class"] = _CLASS
        config.setdefault("model_input_names", list(MODEL_INPUTS))
    if config:
        write_json(directory / TOKENIZER_CONFIG, config)


def _copy_without_limits(source: Path, target: Path) -> None:
    """Copy `tokenizer.json` without truncation and padding, which a training script left in it."""
    stated: dict[str, Any] = read_json(source)
    if stated.get("truncation") is None and stated.get("padding") is None:
        shutil.copyfile(source, target)
        return
    text = json.dumps({**stated, "truncation": None, "padding": None}, ensure_ascii=False, indent=2)
    target.write_text(text, encoding="utf-8")
