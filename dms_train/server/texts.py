"""Generated tokens to text that can be sent at once and never has to be taken back."""

from __future__ import annotations

from dms_train.inference.tokenizer import IncrementalDetokenizer, Tokenizer, until


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
    """The text of one continuation.

    Args:
        tokenizer: Of the model; None gives no text.
        prompt: Tokens before it.
        stops: Texts that end it.

    Attributes:
        decoded: Characters decoded so far, those that are held back included.
        stopped: Whether a stop text has come.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: list[int], stops: tuple[str, ...]
    ) -> None:
        self._tokens = None if tokenizer is None else IncrementalDetokenizer(tokenizer, prompt)
        self._filter = StopFilter(stops)
        self.decoded = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop text has come."""
        return self._filter.stopped

    def add(self, token: int) -> str:
        """The text that can be sent after this token."""
        text = "" if self._tokens is None else self._tokens.add(token)
        self.decoded += len(text)
        return self._filter.add(text)

    def finish(self) -> str:
        """The rest, after the last token."""
        text = "" if self._tokens is None else self._tokens.finish()
        return self._filter.add(text) + self._filter.finish()


class TokenPieces:
    """What to show for each token of a text, special tokens included.

    A token that leaves a character incomplete shows nothing; the one that completes it shows it.

    Args:
        tokenizer: Of the model; None shows nothing.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._stream = None if tokenizer is None else IncrementalDetokenizer(tokenizer, [])

    def add(self, token: int) -> str:
        """The text of the next token."""
        if self._tokenizer is None or self._stream is None:
            return ""
        text = self._stream.add(token)
        if text or self._tokenizer.decode([token]):
            return text
        return self._tokenizer.decode([token], special=True)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that begins a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
