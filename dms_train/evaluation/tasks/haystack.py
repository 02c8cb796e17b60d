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
        near: Size to search from, such as that of the prompt before; it decides the number of
            calls alone.

    Raises:
        EvaluationError: Not even size 0 fits.
    """
    fits, above, step = 0 if near is None else near, None, 1
    while length_of(fits) > limit:
        if fits == 0:
            raise EvaluationError(
                f"task {what}: a prompt without its filler has {length_of(0)} tokens and must fit "
                f"into {limit}; raise task.context_length"
            )
        fits, above, step = max(0, fits - step), fits, 2 * step
    while above is None:
        if length_of(fits + step) <= limit:
            fits, step = fits + step, 2 * step
        else:
            above = fits + step
    return bisect_right(range(fits + 1, above), limit, key=length_of) + fits


def unlike(draw: Callable[[random.Random], str], rng: random.Random) -> Iterator[str]:
    """Yield values of `draw`, each once."""
    seen = set[str]()
    while True:
        value = draw(rng)
        if value not in seen:
            seen.add(value)
            yield value
