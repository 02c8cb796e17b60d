"""The character tokenizer of the exam sheets.

Token 0 is `<eod>`, which ends a document and pads; tokens 1 to 49 are the characters of
`exam_sheets.ALPHABET` in order. There is no unknown token, so other characters are an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from dms_train.data_prep.exam_sheets import ALPHABET
from dms_train.hf.tokenizer_files import MODEL_INPUTS

EOD_TOKEN = "<eod>"


def write_exam_tokenizer(directory: Path) -> None:
    """Write the three files that `AutoTokenizer` and `PreTrainedTokenizerFast` load."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate((EOD_TOKEN, *ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(EOD_TOKEN, special=True, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"eos_token": EOD_TOKEN, "pad_token": EOD_TOKEN}
    _write(directory / "special_tokens_map.json", special)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
        "model_input_names": list(MODEL_INPUTS),
    }
    _write(directory / "tokenizer_config.json", config)


def _write(path: Path, record: Mapping[str, object]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
