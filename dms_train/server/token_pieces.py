"""Texts that the page shows for the tokens of a text."""

from __future__ import annotations

from dms_train.inference.tokenizer import IncrementalDetokenizer, Tokenizer


class TokenPieces:
    """Text to show for each token of a text, special tokens included.

    A token that ends inside a character shows nothing. The token that completes the character shows
    it. At the end of the text, `finish` shows an incomplete character.

    Args:
        tokenizer: Tokenizer of the model; None shows nothing.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._stream = None if tokenizer is None else IncrementalDetokenizer(tokenizer, [])

    def add(self, token: int) -> str:
        """Return the text of the next token."""
        if self._tokenizer is None or self._stream is None:
            return ""
        text = self._stream.add(token)
        if text or self._tokenizer.decode([token]):
            return text
        return self._tokenizer.decode([token], special=True)

    def finish(self) -> str:
        """Return the text that is still held back."""
        return "" if self._stream is None else self._stream.finish()
