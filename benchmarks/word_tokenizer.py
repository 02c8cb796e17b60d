"""Tokenizer whose tokens are words between blanks, for models of the experiments."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from dms_train.data.errors import DataError

EOD = "<eod>"


def write_word_tokenizer(
    directory: Path, words: tuple[str, ...], *, overwrite: bool = False
) -> None:
    """Write the files of a tokenizer whose tokens are words between blanks.

    The first word is `<eod>`, which ends a document and pads. There is no unknown token: other
    words are an error.

    Args:
        directory: Folder of the files.
        words: Words in the order of their ids.
        overwrite: Replace the files of another tokenizer.

    Raises:
        DataError: The directory has another tokenizer, and `overwrite` is not set.
    """
    files = {directory / name: text for name, text in _tokenizer_files(words).items()}
    changed = {path: text for path, text in files.items() if not _has_text(path, text)}
    for path in changed:
        if path.exists() and not overwrite:
            raise DataError(f"{path}: is of another tokenizer; pass --overwrite to replace it")
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")


def _has_text(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


def _tokenizer_files(words: tuple[str, ...]) -> dict[str, str]:
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(EOD, special=True, normalized=False)])
    special = {"eos_token": EOD, "pad_token": EOD}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "special_tokens_map.json": json.dumps(special, indent=2) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }
