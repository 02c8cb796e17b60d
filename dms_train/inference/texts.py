"""Generated tokens to text that can be shown at once and never has to be taken back."""

from __future__ import annotations

from dms_train.inference.tokenizer import IncrementalDetokenizer, Tokenizer


class StopFilter:
    """Ends a text before the first stop text in it.

    The end of a text that may be the beginning of a stop text is held back until it is decided.

    Args:
        stops: Texts that end it; none of them is empty.

    Attributes:
        stopped: Whether a stop text has come; nothing follows.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """The part of the text so far that is decided now."""
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
        """What was held back: the text has ended without the rest of a stop text."""
        held, self._held = self._held, ""
        return held


class GeneratedText:
    """The text of one continuation, which grows by tokens and is never taken back.

    Tokens are decoded when the text is asked for; at once where a stop text may end it.

    Args:
        tokenizer: Of the model; None gives no text.
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
        """What is decided: no incomplete character, no end that may begin a stop text."""
        self._decode()
        return self._text

    @property
    def decoded(self) -> int:
        """Characters decoded so far, those that are held back included."""
        self._decode()
        return self._length

    @property
    def stopped(self) -> bool:
        """Whether a stop text has come."""
        return self._filter.stopped

    def add(self, tokens: list[int]) -> int:
        """Take the next tokens, up to the one that completes a stop text; how many these are."""
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
        """Add what was held back: no token follows."""
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
    """A text up to the first of the stops in it."""
    ends = [at for at in map(text.find, stops) if at >= 0]
    return text[: min(ends)] if ends else text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that begins a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
