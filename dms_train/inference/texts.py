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
    """The text of one continuation, which grows token by token and is never taken back.

    Args:
        tokenizer: Of the model; None gives no text.
        before: Tokens that the generated ones follow.
        stops: Texts that end it.

    Attributes:
        text: What is decided: without a character that is incomplete, and without an end that may
            be the beginning of a stop text.
        decoded: Characters decoded so far, those that are held back included.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, before: list[int], stops: tuple[str, ...]
    ) -> None:
        self._tokens = None if tokenizer is None else IncrementalDetokenizer(tokenizer, before)
        self._filter = StopFilter(stops)
        self.text = ""
        self.decoded = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop text has come."""
        return self._filter.stopped

    def add(self, token: int) -> None:
        """Take the next token."""
        text = "" if self._tokens is None else self._tokens.add(token)
        self.decoded += len(text)
        self.text += self._filter.add(text)

    def finish(self) -> None:
        """Add what was held back: no token follows."""
        text = "" if self._tokens is None else self._tokens.finish()
        self.text += self._filter.add(text) + self._filter.finish()


def until(text: str, stops: tuple[str, ...]) -> str:
    """A text up to the first of the stops in it."""
    ends = [at for at in map(text.find, stops) if at >= 0]
    return text[: min(ends)] if ends else text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that begins a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
