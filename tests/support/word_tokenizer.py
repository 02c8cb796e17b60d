"""A tokenizer whose tokens are words between blanks."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers


def write_word_tokenizer(directory: Path, words: tuple[str, ...]) -> None:
    """Write its files; the first word ends a document."""
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(words[0], special=True, normalized=False)])
    directory.mkdir(parents=True, exist_ok=True)
    inner.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words[0]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
