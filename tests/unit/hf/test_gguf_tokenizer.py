"""Tokenizers of GGUF files: the ids of the tokenizer that was stored."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("gguf")

from dms_train.hf.gguf_directory import convert_gguf
from dms_train.hf.tokenizer_files import read_chat_tokenizer, read_tokenizer
from tests.support import gguf_files

TEXTS = (
    gguf_files.TEXT,
    "In 2023, 12345 people paid $1,299.99 (№ 42½) x² Ⅷ ٣٤٥ \uff11\uff12\uff13",
    "<|im_start|>user\nHi 99<|im_end|>\n<|endoftext|>",
    "   leading, trailing   \r\n\r\n a\r b\t\tI'LL we've DON'T",
    "0x1F 3.14e-10 foo_bar123baz 東京 😀👩‍👩‍👧",
)


def converted(tmp_path, **changes):
    """The directory of a file with these changes of its metadata."""
    path = gguf_files.model_file(tmp_path / "m.gguf", **changes)
    convert_gguf(path, tmp_path / "out")
    return tmp_path / "out"


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


def byte_level(pre, made):
    return gguf_files.tokenizer_metadata(made, pre)


@pytest.mark.parametrize(("pre", "digits"), [("smollm", True), ("gpt-2", False)])
def test_byte_level_ids_are_those_of_the_stored_tokenizer(tmp_path, pre, digits):
    made = gguf_files.tokenizer(digits)
    found = read_tokenizer(converted(tmp_path, **byte_level(pre, made)))
    for text in TEXTS:
        assert ids(found, text) == ids(made, text)
        assert found.decode(ids(found, text), skip_special_tokens=False) == text


def test_every_digit_of_smollm_is_a_token(tmp_path):
    made = gguf_files.tokenizer(digits=False)  # its merges join digits
    joined = read_tokenizer(converted(tmp_path, **byte_level("gpt-2", made)))
    (tmp_path / "other").mkdir()
    split = read_tokenizer(converted(tmp_path / "other", **byte_level("smollm", made)))
    assert len(ids(split, "345")) == 3
    assert len(ids(joined, "345")) < 3


PATTERNS = {
    "qwen2": ("qwen2", r"\p{N}"),
    "deepseek-r1-qwen": ("qwen2", r"\p{N}"),
    "llama-bpe": ("llama", r"\p{N}{1,3}"),
}


@pytest.mark.parametrize("pre", PATTERNS)
def test_words_are_split_as_the_models_own_tokenizer_does(tmp_path, pre):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    _, numbers = PATTERNS[pre]
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers + r"| ?[^\s\p{L}\p{N}]+"
        r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )  # tokenizer.json of Qwen2 and of Llama 3
    made = gguf_files.tokenizer(digits=False)
    model = json.loads(made.to_str())["model"]
    merges = [tuple(m) for m in model["merges"]]
    expected = Tokenizer(models.BPE(model["vocab"], merges, ignore_merges=pre == "llama-bpe"))
    expected.add_special_tokens(list(gguf_files.SPECIAL))
    expected.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    found = read_tokenizer(converted(tmp_path, **byte_level(pre, made)))
    for text in TEXTS:
        assert ids(found, text) == ids(expected, text)
    decomposed = "cafe\u0301"
    assert (ids(found, decomposed) == ids(found, "café")) is (pre == "qwen2")


@pytest.mark.parametrize(
    ("pre", "stated", "starts"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True)],
)
def test_a_text_starts_with_bos_where_the_file_or_its_kind_says_so(tmp_path, pre, stated, starts):
    facts = byte_level(pre, gguf_files.tokenizer())
    tokenizer = read_chat_tokenizer(
        converted(tmp_path, **{**facts, "tokenizer.ggml.add_bos_token": stated})
    )
    assert (tokenizer("a 1").input_ids[0] == 1) is starts


def test_the_chat_template_is_used(tmp_path):
    tokenizer = read_chat_tokenizer(converted(tmp_path))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "<|im_start|>Hi<|im_end|>"
    assert tokenizer.eos_token_id == 2


def test_rows_without_a_token_get_none(tmp_path):
    facts = gguf_files.tokenizer_metadata(gguf_files.tokenizer())
    tokens, types = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    size = len(tokens)
    padded = [*tokens, f"[PAD{size}]", f"[PAD{size + 1}]"]
    changes = {
        "tokenizer.ggml.tokens": padded,
        "tokenizer.ggml.token_type": [*types[:-1], 4, 5, 5],  # the last token is user-defined
    }
    found = read_tokenizer(converted(tmp_path, **changes))
    assert found.get_vocab_size() == size
    added = found.get_added_tokens_decoder()
    assert not added[size - 1].special
    assert added[1].special


def sentencepiece(**changes):
    """Metadata of a SentencePiece tokenizer with byte fallback, and the tokenizer itself."""
    from tokenizers import SentencePieceBPETokenizer

    made = SentencePieceBPETokenizer(unk_token="<unk>", replacement="▁")
    made.train_from_iterator(
        [gguf_files.TEXT], vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"],
        show_progress=False,
    )  # fmt: skip
    model = json.loads(made.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    merged = ["".join(pair) for pair in model["merges"]]
    single = [piece for piece in pieces[3:] if piece not in merged]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *merged, *single]
    scores = [0.0] * 259 + [-float(i) for i in range(len(merged) + len(single))]
    facts = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": None,
        "tokenizer.ggml.add_bos_token": None,
    }
    return {**facts, **changes}, made


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path):
    facts, made = sentencepiece()
    found = read_tokenizer(converted(tmp_path, **facts))
    for text in ("The 12 sheets cost 345 dollars", "def add(a, b):", "a  b"):
        pieces = made.encode(text).tokens
        assert found.encode(text, add_special_tokens=False).tokens == pieces
        assert found.decode(ids(found, text)) == text
    unknown = "Ω"
    assert found.encode(unknown, add_special_tokens=False).tokens == ["▁", "<0xCE>", "<0xA9>"]
    assert found.decode(ids(found, unknown)) == unknown
    assert found.encode("a").tokens[0] == "<s>"  # by default


def test_sentencepiece_without_a_space_in_front(tmp_path):
    facts, _ = sentencepiece(**{"tokenizer.ggml.add_space_prefix": False})
    found = read_tokenizer(converted(tmp_path, **facts))
    assert found.encode("The", add_special_tokens=False).tokens[0][0] != "▁"
    assert found.decode(ids(found, " The")) == " The"
