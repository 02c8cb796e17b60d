"""Text of tokens added one by one equals the text of all tokens, and never changes."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from dms_train.inference.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.support.matrix import FULL_MATRIX

EXAMPLES = 300 if FULL_MATRIX else 80
SAMPLE = ["the river, the stone; the house", "naïve café 東京 😀😀 the end", "  two  spaces"]
TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from("é東😀 a\ufffd"), max_size=40)


@cache
def byte_level() -> Tokenizer:
    """Build a tokenizer like Qwen's and Llama 3's: byte merges may split a character anywhere."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(SAMPLE * 20, trainer)
    return Tokenizer(inner)


@cache
def byte_fallback() -> Tokenizer:
    """Build one like Llama 2's and Mistral's: words that start with a mark, bytes for the rest."""
    pieces = ["<s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    inner = Inner(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    inner.add_special_tokens(["<s>", "<unk>"])
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(inner)


TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


def decoded(
    tokenizer: Tokenizer, before: list[int], ids: list[int], together: int = 1
) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, before)
    groups = [ids[start : start + together] for start in range(0, len(ids), together)]
    return [*(stream.add(*group) for group in groups), stream.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, together=st.integers(1, 50))
@settings(max_examples=EXAMPLES)
def test_an_encoded_text_is_decoded_to_itself(name, text, together):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(text)
    if tokenizer.decode(ids) == text:  # not of Llama 2's: it drops a space at the front
        assert "".join(decoded(tokenizer, [], ids, together)) == text


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, at=st.integers(0, 60), together=st.integers(1, 50))
@settings(max_examples=EXAMPLES)
def test_a_text_continues_a_prompt(name, text, at, together):
    """The prompt may end anywhere, also inside a character."""
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode("the " + text)
    whole, head = tokenizer.decode(ids), tokenizer.decode(ids[:at])
    rest = "".join(decoded(tokenizer, ids[:at], ids[at:], together))
    # half a character at the end of the prompt is no part of it once the other half has come
    assert whole in (head + rest, head.rstrip("\ufffd") + rest)


@given(ids=st.lists(st.integers(1, 256), max_size=30), together=st.integers(1, 8))
@settings(max_examples=EXAMPLES)
def test_bytes_that_form_no_character_become_replacement_characters(ids, together):
    """Python's own decoder is the reference for any bytes."""
    tokenizer = byte_level()
    alphabet = byte_alphabet()
    data = bytes(alphabet[tokenizer._inner.id_to_token(token)] for token in ids)
    assert "".join(decoded(tokenizer, [], ids, together)) == data.decode(errors="replace")


@given(data=st.binary(max_size=6), after=st.booleans())
@example(data=b" \x80", after=False)
@settings(max_examples=EXAMPLES)
def test_byte_tokens_are_characters_or_a_replacement_character_each(data, after):
    """In a run of byte tokens, characters before a wrong byte were returned already and stay."""
    tokenizer = byte_fallback()
    ids = [tokenizer._inner.token_to_id(f"<0x{byte:02X}>") for byte in data]
    ids += tokenizer.encode("a")[1:] if after else []
    expected = ""
    while data:
        ends = [n for n in range(1, len(data) + 1) if is_text(data[:n])]
        if not ends:
            expected += "\ufffd" * len(data)
            break
        expected, data = expected + data[: ends[0]].decode(), data[ends[0] :]
    before = tokenizer.encode("b")  # a space at the front of a text is dropped
    assert "".join(decoded(tokenizer, before, ids)) == expected + "a" * after


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
@settings(max_examples=EXAMPLES)
def test_the_bytes_of_tokens_are_those_of_their_text(name, text):
    """They include the space in front of a word, which decoding a Llama 2 token alone loses."""
    tokenizer = TOKENIZERS[name]()
    found = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
    start = " " if name == "byte_fallback" and text else ""
    assert found == (start + text.replace("▁", " " if start else "▁")).encode()


def test_the_bytes_of_a_special_token_are_its_name():
    for name, special in (("byte_level", 0), ("byte_fallback", 1)):
        tokenizer = TOKENIZERS[name]()
        assert tokenizer.token_bytes(special) == tokenizer._inner.id_to_token(special).encode()


def test_half_of_a_character_is_held_back():
    tokenizer = byte_level()
    ids = tokenizer.encode("a🦀b")
    parts = decoded(tokenizer, [], ids)
    assert [part for part in parts if part] == ["a", "🦀", "b"]
    assert decoded(tokenizer, [], ids[:3]) == ["a", "", "", "\ufffd"]


def test_special_tokens_are_no_text():
    tokenizer = byte_level()
    ids = [0, *tokenizer.encode("one"), 0, *tokenizer.encode(" two")]
    assert "".join(decoded(tokenizer, [0], ids)) == "one two"


@cache
def byte_alphabet() -> dict[str, int]:
    """Build GPT-2's table: printable bytes stand for themselves, others map to U+0100 and up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in printable)
    return table | {chr(256 + i): byte for i, byte in enumerate(rest)}
