"""Text of generated tokens for streaming: text that was returned never changes."""

from __future__ import annotations

from dms_train.inference.tokenizer import IncrementalDetokenizer, Tokenizer


class StopFilter:
    """Filter that ends a text before the first stop text in it.

    If the end of the text may begin a stop text, the filter holds it back until more text decides.

    Args:
        stops: Texts that end it; none of them is empty.

    Attributes:
        stopped: True after a stop text; further text is dropped.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """Add text, and return the text that is final now."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        before = until(text, self._stops)
        if before != text:
            self.stopped, self._held = True, ""
            return before
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """Return the text held back; no more text follows that could complete a stop text."""
        held, self._held = self._held, ""
        return held


class GeneratedText:
    """Text of one continuation; it grows by tokens and never shrinks.

    Tokens are decoded when the text is read. With stop texts, they are decoded at once.

    Args:
        tokenizer: Tokenizer of the model; without one, the text stays empty.
        before: Tokens that the generated ones follow.
        stops: Texts that end it.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, before: list[int], stops: tuple[str, ...]
    ) -> None:
        self._tokens = None if tokenizer is None else IncrementalDetokenizer(tokenizer, before)
        self._stops, self._filter = stops, StopFilter(stops)
        self._waiting: list[int] = []  # tokens that are not decoded yet
        self._text, self._length = "", 0

    @property
    def text(self) -> str:
        """Final text, without an incomplete character or an end that may begin a stop text."""
        self._decode()
        return self._text

    @property
    def decoded(self) -> int:
        """Number of characters decoded so far, including those held back."""
        self._decode()
        return self._length

    @property
    def stopped(self) -> bool:
        """True after a stop text."""
        return self._filter.stopped

    def add(self, tokens: list[int]) -> int:
        """Add tokens up to the one that completes a stop text; return how many were added."""
        if self._tokens is None:
            return len(tokens)
        if not self._stops:
            self._waiting += tokens
            return len(tokens)
        for taken, token in enumerate(tokens, start=1):
            self._waiting.append(token)
            self._decode()
            if self.stopped:
                return taken
        return len(tokens)

    def finish(self) -> None:
        """Add the text held back at the end of the sequence."""
        self._decode()
        text = "" if self._tokens is None else self._tokens.finish()
        self._text += self._filter.add(text) + self._filter.finish()

    def _decode(self) -> None:
        if self._tokens is not None and self._waiting:
            text = self._tokens.add(*self._waiting)
            self._waiting.clear()
            self._length += len(text)
            self._text += self._filter.add(text)


def until(text: str, stops: tuple[str, ...]) -> str:
    """Return a text up to the first stop text in it."""
    ends = [at for at in map(text.find, stops) if at >= 0]
    return text[: min(ends)] if ends else text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that begins a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
