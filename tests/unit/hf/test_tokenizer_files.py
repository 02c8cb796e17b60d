"""Every command reads a tokenizer alike: as tokenizer.json states it, with the tokens beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Inner
from transformers import PreTrainedTokenizerFast

from dms_train.data_prep.encode import load_tokenizer
from dms_train.hf.errors import HFError
from dms_train.hf.tokenizer_files import read_chat_tokenizer, read_tokenizer
from dms_train.inference.tokenizer import Tokenizer
from tests.support import piece_tokenizer, r1_tokenizer

TEXT = "there was  a cat: 2023 naïve 東京 😀\n\tto the park"
CONFIG = "tokenizer_config.json"


def as_stored(folder: Path, text: str, *, special: bool) -> list[int]:
    """Ids by the tokenizers package alone."""
    ids: list[int] = (
        Inner.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=special).ids
    )
    return ids


def all_readings(folder: Path, text: str, *, special: bool) -> list[list[int]]:
    """Ids by the engine and by the tools that use transformers."""
    engine = Tokenizer.load(folder)
    assert engine is not None
    data = load_tokenizer(str(folder))
    return [
        engine.encode(text, special=special),
        data(text, add_special_tokens=special)["input_ids"],
    ]


def token(text: str, **properties: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": text, **flags, "special": True, **properties}


def added(text: str) -> dict[str, Any]:
    return {"__type": "AddedToken", **token(text)}


@pytest.mark.parametrize("write", [piece_tokenizer.write_tokenizer, r1_tokenizer.write_tokenizer])
@pytest.mark.parametrize(
    ("model_type", "tokenizer_class"),
    [
        ("qwen2", "PreTrainedTokenizerFast"),
        ("qwen2", "LlamaTokenizerFast"),
        ("llama", "GPT2Tokenizer"),
        ("qwen3", "Qwen2Tokenizer"),
        (None, "LlamaTokenizer"),
    ],
)
def test_other_files_do_not_replace_the_tokenizer(
    tmp_path: Path, write: Callable[[Path], Any], model_type: str | None, tokenizer_class: str
) -> None:
    write(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text("utf-8"))
    (tmp_path / CONFIG).write_text(json.dumps({**config, "tokenizer_class": tokenizer_class}))
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for special in (False, True):
        right = as_stored(tmp_path, TEXT, special=special)
        assert all_readings(tmp_path, TEXT, special=special) == [right, right]


@pytest.mark.parametrize(
    "limits",
    [{"truncation": True, "max_length": 8}, {"padding": "max_length", "max_length": 90}],
)
def test_truncation_and_padding_of_a_training_script_do_not_apply(
    tmp_path: Path, limits: dict[str, Any]
) -> None:
    piece_tokenizer.write_tokenizer(tmp_path, pad_token="<unk>")
    right = as_stored(tmp_path, TEXT, special=True)
    used = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    used(TEXT, **limits)
    used.save_pretrained(tmp_path)
    assert len(as_stored(tmp_path, TEXT, special=True)) != len(right)
    assert all_readings(tmp_path, TEXT, special=True) == [right, right]


SIDE_FILES = {
    "additional": {CONFIG: {"additional_special_tokens": ["<|im_end|>", added("<|b|>")]}},
    "with ids": {CONFIG: {"added_tokens_decoder": {"292": token("<|im_end|>")}}},
    "not in the order of the file": {
        CONFIG: {"added_tokens_decoder": {"293": token("<|b|>"), "292": token("<|im_end|>")}}
    },
    "pad": {CONFIG: {"pad_token": "<|pad|>"}},
    "by name": {CONFIG: {"extra_special_tokens": {"image_token": "<|im_end|>"}}},
    "other properties": {CONFIG: {"added_tokens_decoder": {"2": token("</s>", lstrip=True)}}},
    "a word": {CONFIG: {"additional_special_tokens": ["at"]}},
    "special_tokens_map": {
        "special_tokens_map.json": {"pad_token": {"content": "<|pad|>", "lstrip": True}}
    },
    "added_tokens": {"added_tokens.json": {"<|im_end|>": 292, "<|b|>": 293}},
}


@pytest.mark.parametrize("name", SIDE_FILES)
def test_tokens_that_only_side_files_name_have_one_id(tmp_path: Path, name: str) -> None:
    piece_tokenizer.write_tokenizer(tmp_path, **SIDE_FILES[name].get(CONFIG, {}))
    for file in SIDE_FILES[name].keys() - {CONFIG}:
        (tmp_path / file).write_text(json.dumps(SIDE_FILES[name][file]))
    text = "a cat<|im_end|> was <|b|> there   </s> <|pad|>a"
    truth = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    right = truth(text)["input_ids"]
    assert right != as_stored(tmp_path, text, special=True)
    assert all_readings(tmp_path, text, special=True) == [right, right]
    assert read_tokenizer(tmp_path).get_vocab_size() == len(truth)


def test_a_token_that_cannot_have_its_id_is_refused(tmp_path: Path) -> None:
    declared = {"999": token("<|far|>")}
    piece_tokenizer.write_tokenizer(tmp_path, added_tokens_decoder=declared)
    with pytest.raises(HFError, match=r"gives '<\|far\|>' the id 999, .* would be 292"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("file", [CONFIG, "special_tokens_map.json"])
@pytest.mark.parametrize("value", ["<FILL_ME>", added("<FILL_ME>")])
def test_other_keys_add_no_token(tmp_path: Path, file: str, value: Any) -> None:
    """Transformers 4 ignores `fill_token` of CodeLlama, version 5 adds it."""
    keys = {"fill_token": value, "image_token": "<image>", "add_prefix_token": True}
    piece_tokenizer.write_tokenizer(tmp_path, **(keys if file == CONFIG else {}))
    if file != CONFIG:
        (tmp_path / file).write_text(json.dumps(keys))
    text = "a <FILL_ME> cat<image></s>"
    right = as_stored(tmp_path, text, special=True)
    assert all_readings(tmp_path, text, special=True) == [right, right]
    assert len(read_chat_tokenizer(tmp_path)) == read_tokenizer(tmp_path).get_vocab_size()


def test_another_key_may_name_a_token_of_the_file(tmp_path: Path) -> None:
    piece_tokenizer.write_tokenizer(tmp_path, turn_token="</s>", fill_token="<FILL_ME>")
    text = "a cat</s> was"
    right = as_stored(tmp_path, text, special=True)
    assert all_readings(tmp_path, text, special=True) == [right, right]


def test_special_tokens_are_found_although_a_file_says_to_split_them(tmp_path: Path) -> None:
    piece_tokenizer.write_tokenizer(tmp_path, split_special_tokens=True)
    right = as_stored(tmp_path, "a cat</s> was", special=True)
    assert all_readings(tmp_path, "a cat</s> was", special=True) == [right, right]


def test_readings_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piece_tokenizer.write_tokenizer(tmp_path)
    load = PreTrainedTokenizerFast.from_pretrained

    def load_otherwise(*args: Any, **kwargs: Any) -> Any:
        return load(*args, **{**kwargs, "split_special_tokens": True})

    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", load_otherwise)
    with pytest.raises(HFError, match=r"give different ids \(the ids of '.*' differ\)"):
        read_chat_tokenizer(tmp_path)


def newer(text: str) -> bytes:
    described = json.loads(text)
    described["model"]["type"] = "BPE2"
    return json.dumps(described).encode()


UNREADABLE = {
    "lfs": ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "newer": ("tokenizer.json", newer, "does not load it .* update tokenizers"),
    "cut": ("tokenizer.json", lambda text: text[:90].encode(), "does not load it"),
    "empty": ("tokenizer.json", b"", "does not load it"),
    "utf-16": ("tokenizer.json", lambda text: text.encode("utf-16"), "UTF-16 text; save"),
    "bom": ("tokenizer.json", lambda text: text.encode("utf-8-sig"), "byte-order mark"),
    "config": (CONFIG, b"{", "not valid JSON"),
    "utf-16 config": (CONFIG, lambda text: text.encode("utf-16"), "not valid JSON"),
    "list": (CONFIG, b"[]", "expected a JSON object"),
    "tokens": (CONFIG, b'{"added_tokens_decoder": {"x": 3}}', "its tokens cannot be read"),
    "map": ("special_tokens_map.json", b"\xff", "not valid JSON"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_file_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    file, content, reason = UNREADABLE[name]
    path = piece_tokenizer.write_tokenizer(tmp_path) / file
    path.write_bytes(content(path.read_text("utf-8")) if callable(content) else content)
    for read in (Tokenizer.load, read_chat_tokenizer):
        with pytest.raises(HFError, match=reason) as caught:
            read(tmp_path)
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xef\xbb\xbf{{ bos_token }}", "starts with a byte-order mark"),
        ("{{ bos_token }}".encode("utf-16"), "UTF-16 text"),
        (b"{# ok #}\n\xe9", "template.jinja:2: not UTF-8"),
    ],
)
def test_a_template_in_another_encoding_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    piece_tokenizer.write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(content)
    with pytest.raises(HFError, match=reason):
        read_chat_tokenizer(tmp_path)
