"""Tokenizer of a model directory, read without transformers; incremental detokenization."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

from dms_train.hf.json_files import read_config, read_json
from dms_train.hf.tokenizer_files import TOKENIZER_FILE, read_tokenizer
from dms_train.inference.errors import InferenceError

_CONTEXT = 32  # last tokens of the prompt that are decoded with the first generated token
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")  # byte token of SentencePiece's byte fallback


def _byte_level() -> dict[str, int]:
    """Return the byte that each character of a byte-level token stands for: GPT-2's table."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(0x100 + index): byte for index, byte in enumerate(hidden)
    }


_BYTE_LEVEL = _byte_level()


class Tokenizer:
    """Tokenizer of a `tokenizer.json`, read by the tokenizers package."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, directory: Path) -> Tokenizer | None:
        """Return the tokenizer of a directory; None if it has no tokenizer.json.

        Raises:
            HFError: As `read_tokenizer`.
        """
        if not (directory / TOKENIZER_FILE).is_file():
            return None
        return cls(read_tokenizer(directory))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Encode a text; add the tokenizer's special tokens around it if `special`.

        Raises:
            InferenceError: A tokenizer of whole words does not know a word of the text.
        """
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        except Exception as error:  # the package raises no other type
            raise InferenceError(f"the tokenizer cannot encode the text: {error}") from None
        return ids

    def knows(self, token: str) -> bool:
        """Return whether a text is one token of the vocabulary."""
        return self._inner.token_to_id(token) is not None

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """Decode tokens; keep special tokens if `special`."""
        text: str = self._inner.decode(ids, skip_special_tokens=not special)
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text, including a space in front of a word.

        A special token adds the bytes of its name. A token may be a part of a character only.
        """
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find_bytes(token)
        return known

    def _find_bytes(self, token: int) -> bytes:
        added = self._inner.get_added_tokens_decoder().get(token)
        if added is not None:
            return str(added.content).encode()
        head, anchor = self._anchor
        whole = self.decode([*anchor, token])
        text = whole[len(head) :] if whole.startswith(head) else self.decode([token])
        if _REPLACEMENT not in text:
            return text.encode()
        name = self._inner.id_to_token(token) or ""
        if _BYTE_TOKEN.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        if name and all(character in _BYTE_LEVEL for character in name):
            return bytes(_BYTE_LEVEL[character] for character in name)
        return text.encode()

    @cached_property
    def _anchor(self) -> tuple[str, list[int]]:
        """Text and ids of a token to decode before others, so that they decode as inside a text."""
        added = self._inner.get_added_tokens_decoder()
        for token in range(self._inner.get_vocab_size()):
            text = "" if token in added else self.decode([token])
            if text.isascii() and text.isalnum():
                return text, [token]
        return "", []


class IncrementalDetokenizer:
    """Detokenizer of generated tokens, one or several at a time.

    Text that was returned never changes: bytes of an incomplete character are held back. Bytes that
    cannot form a character become U+FFFD, as when all tokens are decoded at once.

    Tokenizers with byte fallback (Llama 2, Mistral) differ in one point. If a run of byte tokens
    has one wrong byte, decoding all at once gives U+FFFD for every byte of the run. The detokenizer
    has returned the characters before the wrong byte already.

    Args:
        tokenizer: Tokenizer of the model.
        before: Tokens before the generated ones; they decide how the first word is decoded.
    """

    def __init__(self, tokenizer: Tokenizer, before: list[int]) -> None:
        self._tokenizer = tokenizer
        self._known = _context(tokenizer, before)  # decoded together with the pending tokens
        self._pending: list[int] = []

    def add(self, *tokens: int) -> str:
        """Add tokens and return the text that they complete; empty in the middle of a character."""
        self._pending += tokens
        head, text = self._decoded()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        before = self._known if head.endswith(_REPLACEMENT) else []  # the start of a character
        self._known, self._pending = _context(self._tokenizer, before + self._pending), []
        return text

    def finish(self) -> str:
        """Return the text held back, with U+FFFD for an incomplete character at its end."""
        return self._decoded()[1] if self._pending else ""

    def _decoded(self) -> tuple[str, str]:
        """Return the text of the known tokens, and the text of the pending tokens after it."""
        head = self._tokenizer.decode(self._known)
        whole = self._tokenizer.decode(self._known + self._pending)
        known = len(head.rstrip(_REPLACEMENT))
        dropped = not head and whole.startswith(
            _REPLACEMENT
        )  # the known tokens were a space that has disappeared
        if dropped or head[:known] != whole[:known]:  # a wrong byte after those of `head`
            return head, self._tokenizer.decode(self._pending)
        while known < len(head) and whole.startswith(_REPLACEMENT, known):
            known += 1  # bytes of `head` that the pending tokens do not complete
        return head, whole[known:]


def _context(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """Return the last tokens of a text, from the start of a character on."""
    size = _CONTEXT
    while size < len(tokens) and tokenizer.decode(tokens[-size:]).startswith(_REPLACEMENT):
        size *= 2
    return tokens[-size:]


def read_stop_ids(directory: Path) -> frozenset[int]:
    """Read the end-of-text tokens from generation_config.json, else from config.json."""
    path = directory / "generation_config.json"
    stated = read_json(path).get("eos_token_id") if path.is_file() else None
    if stated is None:
        path = directory / "config.json"
        stated = read_config(directory).get("eos_token_id")
    if stated is None:
        return frozenset()
    ids = stated if isinstance(stated, list) else [stated]
    if any(type(number) is not int or number < 0 for number in ids):
        raise InferenceError(
            f"{path}: eos_token_id={stated!r} is not supported; state a token id, a list of them "
            "or null"
        )
    return frozenset(ids)
