"""Texts of single tokens in answers: OpenAI's way of writing them, with every space and token."""

from __future__ import annotations

import pytest

from dms_train.inference.outputs import TokenLogprobs
from dms_train.inference.tokenizer import Tokenizer
from dms_train.server.answers import ChatShape, CompletionShape
from dms_train.server.generation import Part, TokenEntry
from tests.support import piece_tokenizer

TEXT = "there was a cat, naïve"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    found = Tokenizer.load(piece_tokenizer.write_tokenizer(tmp_path_factory.mktemp("pieces")))
    assert found is not None
    return found


def part(tokens: list[int], top: dict[int, float]) -> Part:
    entries = [TokenEntry(token, TokenLogprobs(-0.5, top)) for token in tokens]
    return Part(index=0, text="", entries=entries, finish_reason="stop")


def test_tokens_put_together_are_the_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT, special=False)
    answer = CompletionShape("1", "m", tokenizer).chunk(part(tokens, {}))["logprobs"]
    whole = "".join(token for token in answer["tokens"] if not token.startswith("bytes:"))
    assert whole == " " + TEXT.replace("ï", "")
    assert [t for t in answer["tokens"] if t.startswith("bytes:")] == [
        "bytes:\\xc3",
        "bytes:\\xaf",
    ]
    entries = ChatShape("1", "m", tokenizer).chunk(part(tokens, {}))["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == " " + TEXT
    assert {entry["token"] for entry in entries if 0xC3 in entry["bytes"]} == {"\\xc3"}


def test_tokens_of_one_text_are_not_merged(tokenizer: Tokenizer) -> None:
    byte = 3 + ord("a")  # the byte token of the letter, which is a token of its own too
    letter = next(i for i in range(259, 292) if tokenizer.token_bytes(i) == b"a")
    top = {letter: -0.5, byte: -1.0, byte + 1: -2.0}
    completion = CompletionShape("1", "m", tokenizer).chunk(part([letter], top))
    assert completion["logprobs"]["top_logprobs"] == [
        {"a": -0.5, f"token_id:{byte}": -1.0, "b": -2.0}
    ]
    chat = ChatShape("1", "m", tokenizer).chunk(part([letter], top))
    (entry,) = chat["logprobs"]["content"]
    assert [(t["token"], t["logprob"]) for t in entry["top_logprobs"]] == [
        ("a", -0.5),
        ("a", -1.0),
        ("b", -2.0),
    ]


def test_without_a_tokenizer_tokens_have_their_ids() -> None:
    answer = CompletionShape("1", "m", None).chunk(part([5, 6], {5: -0.5, 6: -1.0}))["logprobs"]
    assert answer["tokens"] == ["token_id:5", "token_id:6"]
    assert answer["top_logprobs"][0] == {"token_id:5": -0.5, "token_id:6": -1.0}
    (entry, _) = ChatShape("1", "m", None).chunk(part([5, 6], {}))["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:5", None)
