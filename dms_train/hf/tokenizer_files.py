"""Tokenizer of a model directory, loaded in the same way by every command.

`tokenizer.json` is the truth. Truncation and padding that a training script left in it do not
apply. Tokens that only the files beside it name are added like PreTrainedTokenizerFast of
transformers adds them. The order decides their ids.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dms_train.hf.errors import HFError
from dms_train.hf.json_files import read_json
from dms_train.hf.text_files import decode_text

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
# `model_input_names`; without it transformers 4 adds token_type_ids, which `generate` refuses
MODEL_INPUTS = ("input_ids", "attention_mask")
_SPECIAL_MAP, _ADDED = "special_tokens_map.json", "added_tokens.json"
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
# in the order of transformers
_SPECIAL_KEYS = tuple(f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
_PROBE = (
    "Hello, World!  It's 2023 (№ 1,234.50):\n\n\tif naïve == 'café':\n        return 東京 😀<|x|> "
)
_PROBE_TOKENS = 64


def read_tokenizer(directory: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a directory.

    Raises:
        HFError: The directory has no `tokenizer.json`, the installed tokenizers cannot read it, or
            a file beside it is damaged or gives a token another id.
    """
    path = directory / TOKENIZER_FILE
    import tokenizers

    if not path.is_file():
        raise HFError(f"{directory}: no {TOKENIZER_FILE}; give a local tokenizer directory")
    text = _plain_text(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises no other type
        raise HFError(
            f"{path}: tokenizers {tokenizers.__version__} does not load it ({_one_line(error)}); "
            "copy the file again or update tokenizers"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_tokens(directory, tokenizer)
    return tokenizer


def read_chat_tokenizer(directory: Path) -> Any:
    """Return transformers' tokenizer of a directory, with its chat template and special tokens.

    No code of the directory is run. AutoTokenizer is not used, because it replaces parts of
    `tokenizer.json` according to the class or model type that other files state.

    Raises:
        HFError: See `read_tokenizer`; also, transformers cannot read the files, or gives other ids
            than `read_tokenizer`.
        ModuleNotFoundError: transformers is not installed.
    """
    tokenizer = read_tokenizer(directory)
    for pattern in _TEMPLATES:
        for path in directory.glob(pattern):
            _plain_text(path)
    from transformers import PreTrainedTokenizerFast  # not in the base installation

    try:
        wrapped = PreTrainedTokenizerFast.from_pretrained(
            os.fspath(directory),
            local_files_only=True,
            trust_remote_code=False,
            split_special_tokens=False,
            **_without_other_keys(directory, tokenizer),
        )
    except Exception as error:  # damaged files surface as many kinds of error
        raise HFError(f"{directory}: the tokenizer does not load ({_one_line(error)})") from None
    _require_same_ids(directory, tokenizer, wrapped)
    return wrapped


def _plain_text(path: Path) -> str:
    """Read a file that transformers reads, too: UTF-8 without a byte-order mark."""
    data = path.read_bytes()
    if data.startswith(b"\xef\xbb\xbf"):
        raise HFError(f"{path}: starts with a byte-order mark; save the file without one")
    return decode_text(str(path), data)


def _add_tokens(directory: Path, tokenizer: Any) -> None:
    """Add the tokens that files beside `tokenizer.json` name, with their properties."""
    declared, named = _named_tokens(directory)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([token for _, token in declared])
    for stated_id, token in declared:
        actual_id = tokenizer.token_to_id(token.content)
        if token.content not in known and actual_id != stated_id:
            raise HFError(
                f"{directory}: {TOKENIZER_CONFIG} gives {token.content!r} the id {stated_id}, in "
                f"{TOKENIZER_FILE} it would be {actual_id}; take both files from the same model"
            )
    known |= {token.content for _, token in declared}
    tokenizer.add_tokens([token for token in named if token.content not in known])


def _named_tokens(directory: Path) -> tuple[list[tuple[int, Any]], list[Any]]:
    """List tokens with ids by id, then special tokens in transformers' order."""
    config, *older = _special_files(directory)
    try:
        named = _special_tokens(config, *older)
        if not older:
            with_ids = {int(i): _token(v) for i, v in config["added_tokens_decoder"].items()}
        else:
            special = {token.content for token in named}
            with_ids = {
                index: _token({"content": text, "special": text in special})
                for text, index in _optional_json(directory / _ADDED).items()
            }
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, HFError):
            raise
        raise HFError(
            f"{directory / TOKENIZER_CONFIG}: its tokens cannot be read ({_one_line(error)}); copy "
            "the file again"
        ) from None
    return sorted(with_ids.items(), key=lambda item: item[0]), named


def _special_files(directory: Path) -> list[dict[str, Any]]:
    """List the files that name special tokens; the second one counts if the config lacks ids."""
    config = _optional_json(directory / TOKENIZER_CONFIG)
    if config.get("added_tokens_decoder") is not None:
        return [config]
    return [config, _optional_json(directory / _SPECIAL_MAP)]  # file of transformers before 4.34


def _special_tokens(*files: dict[str, Any]) -> list[Any]:
    """Read the special tokens of files; a later file replaces single tokens of earlier ones."""
    single = {key: value for file in files for key, value in file.items()}
    values = [single.get(key) for key in _SPECIAL_KEYS]
    for file in files:
        for key in _SPECIAL_LISTS:
            listed = file.get(key) or []
            values += listed.values() if isinstance(listed, dict) else listed
    entries = [{"content": value} if isinstance(value, str) else value for value in values]
    return [_token({**value, "special": True}) for value in entries if isinstance(value, dict)]


def _without_other_keys(directory: Path, tokenizer: Any) -> dict[str, bool]:
    """Return arguments that stop transformers 5 from adding tokens for keys like `fill_token`.

    Version 4 ignores these keys. In both versions, a value other than text replaces the value of
    the file.
    """
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    values: dict[str, Any] = {}
    for file in _special_files(directory):
        values.update(file)
    unknown = {}
    for key in values.keys() - set(_SPECIAL_KEYS):
        text = values[key].get("content") if isinstance(values[key], dict) else values[key]
        if key.endswith("_token") and isinstance(text, str) and text not in known:
            unknown[key] = True
    return unknown


def _token(value: dict[str, Any]) -> Any:
    from tokenizers import AddedToken

    return AddedToken(**{key: item for key, item in value.items() if key != "__type"})


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _require_same_ids(directory: Path, tokenizer: Any, wrapped: Any) -> None:
    """Refuse transformers' tokenizer if it gives a text other ids, or ids another text."""
    size, added = tokenizer.get_vocab_size(), tokenizer.get_added_tokens_decoder().values()
    ids = list(range(min(size, _PROBE_TOKENS)))
    sample = tokenizer.decode(ids, skip_special_tokens=False)
    differing = None
    for text in (_PROBE, sample, " a ".join(token.content for token in added)):
        for special in (False, True):
            if _ids(tokenizer, text, special) != _wrapped_ids(wrapped, text, special):
                differing = f"the ids of {text[:40]!r} differ"
    if wrapped.decode(ids, clean_up_tokenization_spaces=False) != sample:
        differing = f"the text of tokens 0 to {ids[-1]} differs"
    if len(wrapped) != size:
        differing = f"{len(wrapped)} tokens, not {size}"
    if differing:
        raise HFError(
            f"{directory}: transformers and {TOKENIZER_FILE} give different ids ({differing}); "
            f"correct {TOKENIZER_CONFIG}, or save the tokenizer again"
        )


def _ids(tokenizer: Any, text: str, special: bool) -> list[int] | None:
    """Encode a text; None if the tokenizer refuses it, which tokenizers of whole words may do."""
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    except Exception:  # the package raises no other type
        return None
    return ids


def _wrapped_ids(wrapped: Any, text: str, special: bool) -> list[int] | None:
    try:
        ids: list[int] = wrapped(text, add_special_tokens=special, verbose=False)["input_ids"]
    except Exception:  # as above
        return None
    return ids


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
