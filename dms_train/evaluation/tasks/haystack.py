"""Long texts to hide something in, and search for the longest one that fits a prompt."""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path

from dms_train.evaluation.errors import EvaluationError
from dms_train.hf.errors import HFError
from dms_train.hf.text_files import read_text

_SENTENCE_END = re.compile(r"(?<=[.!?]) +(?=[A-Z0-9\"'(])")


def read_words(path: Path) -> list[str]:
    """Return the words of a text file.

    Raises:
        EvaluationError: The file holds no text, or is not UTF-8.
        FileNotFoundError: There is no such file.
    """
    try:
        words = read_text(path).split()
    except HFError as error:
        raise EvaluationError(str(error)) from None
    if not words:
        raise EvaluationError(f"{path}: no text")
    return words


def cycled(words: list[str], count: int) -> str:
    """Return `count` words joined by blanks, from the start again where the text ends."""
    repeats, rest = divmod(count, len(words))
    return " ".join(words * repeats + words[:rest])


def sentences(text: str) -> list[str]:
    """Split a text after full stops, question marks and exclamation marks."""
    return _SENTENCE_END.split(text)


def largest_fit(
    length_of: Callable[[int], int], limit: int, what: str, near: int | None = None
) -> int:
    """Return the largest size whose prompt is at most `limit` tokens long.

    Args:
        length_of: Function that returns the number of tokens of the prompt of a size; grows with
            the size.
        limit: Maximum number of tokens.
        what: Name of the task, for the refusal.
        near: Size to search from, such as that of the previous prompt. The result does not depend
            on it, only the number of calls.

    Raises:
        EvaluationError: Not even size 0 fits.
    """
    low, high, step = near or 0, None, 1
    while length_of(low) > limit:
        if low == 0:
            raise EvaluationError(
                f"task {what}: a prompt without its filler has {length_of(0)} tokens and must fit "
                f"into {limit}; raise task.context_length"
            )
        low, high, step = max(0, low - step), low, 2 * step
    while high is None:
        if length_of(low + step) <= limit:
            low, step = low + step, 2 * step
        else:
            high = low + step
    return bisect_right(range(low + 1, high), limit, key=length_of) + low


def unlike(draw: Callable[[random.Random], str], rng: random.Random) -> Iterator[str]:
    """Yield values of `draw`, each once."""
    seen = set[str]()
    while True:
        value = draw(rng)
        if value not in seen:
            seen.add(value)
            yield value
