"""Text to tokens and back, from the files of a model directory, without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dms_train.hf.json_files import read_config, read_json
from dms_train.inference.errors import InferenceError

_CONTEXT = 32  # tokens of the prompt that are decoded with the first generated one
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """`tokenizer.json`, read by the tokenizers package."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @classmethod
    def load(cls, directory: Path) -> Tokenizer | None:
        """The tokenizer of a directory; None if it has no tokenizer.json.

        Raises:
            InferenceError: The tokenizers package is not installed.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            from tokenizers import Tokenizer as Inner
        except ImportError:
            raise InferenceError("text needs the tokenizers package; install it") from None
        return cls(Inner.from_file(str(path)))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids, with the tokenizer's special tokens around the text if `special`.

        Raises:
            InferenceError: The text has words that a tokenizer of whole words does not know.
        """
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        except Exception as error:  # the package raises no other type
            raise InferenceError(f"the tokenizer cannot encode the text: {error}") from None
        return ids

    def knows(self, token: str) -> bool:
        """Whether a text is one token of the vocabulary."""
        return self._inner.token_to_id(token) is not None

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """Text, with special tokens if `special`."""
        text: str = self._inner.decode(ids, skip_special_tokens=not special)
        return text


class IncrementalDetokenizer:
    """Text of generated tokens, one or several at a time.

    A text that was returned never changes: bytes of a character whose rest has not come yet are
    held back. Bytes that can form no character any more become U+FFFD, as in the text of all tokens
    at once. Tokenizers with byte fallback (Llama 2, Mistral) differ in one point: all at once, they
    give U+FFFD for every byte of a run of byte tokens with one wrong byte, also for the characters
    before it, which were returned already here.

    Args:
        tokenizer: Of the model.
        before: Tokens that the generated ones follow; they decide how the first word is decoded.
    """

    def __init__(self, tokenizer: Tokenizer, before: list[int]) -> None:
        self._tokenizer = tokenizer
        self._known = _context(tokenizer, before)  # decoded together with the pending tokens
        self._pending: list[int] = []

    def add(self, *tokens: int) -> str:
        """The text that these tokens complete; empty while a character is incomplete."""
        self._pending += tokens
        head, text = self._decoded()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        before = self._known if head.endswith(_REPLACEMENT) else []  # the start of a character
        self._known, self._pending = _context(self._tokenizer, before + self._pending), []
        return text

    def finish(self) -> str:
        """What was held back; U+FFFD for an incomplete character at its end."""
        return self._decoded()[1] if self._pending else ""

    def _decoded(self) -> tuple[str, str]:
        """Text of the known tokens and of the pending ones behind them."""
        head = self._tokenizer.decode(self._known)
        whole = self._tokenizer.decode(self._known + self._pending)
        known = len(head.rstrip(_REPLACEMENT))
        dropped = not head and whole.startswith(_REPLACEMENT)  # it was a space, and is no more
        if dropped or head[:known] != whole[:known]:  # a wrong byte behind those of `head`
            return head, self._tokenizer.decode(self._pending)
        while known < len(head) and whole.startswith(_REPLACEMENT, known):
            known += 1  # those of `head` that the pending tokens do not complete
        return head, whole[known:]


def _context(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """The last tokens of a text, from the start of a character on."""
    size = _CONTEXT
    while size < len(tokens) and tokenizer.decode(tokens[-size:]).startswith(_REPLACEMENT):
        size *= 2
    return tokens[-size:]


def read_stop_ids(directory: Path) -> frozenset[int]:
    """End-of-text tokens from generation_config.json, else config.json."""
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
