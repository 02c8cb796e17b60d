"""Filler texts of the lab, and the names of the things hidden in them.

A name is two letters. One name in sixteen is held out by a hash: training documents never have it,
problems ask for it, and everything else in a problem has names of the training documents.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.word_tokenizer import EOD
from dms_train.data.errors import DataError
from research.data.token_documents import Tokens
from research.data.words import ADJECTIVES, ADVERBS, ID, LETTERS, NOUNS, VERBS, encoded

Name = tuple[int, int]  # token ids


def held_out(name: str) -> bool:
    """Return whether no training document has this name, such as `q d`."""
    digest = hashlib.sha256(f"name:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 16 == 0


def _names(*, of_problems: bool) -> tuple[Name, ...]:
    pairs = itertools.product(LETTERS, LETTERS)
    return tuple((ID[a], ID[b]) for a, b in pairs if held_out(f"{a} {b}") == of_problems)


TRAINING_NAMES, HELD_OUT_NAMES = _names(of_problems=False), _names(of_problems=True)

# 4,096 sentences such as `the old river turns slowly .`, uint16 [sentences, 6]
SENTENCES = np.array(
    [
        encoded(f"the {' '.join(words)} .")
        for words in itertools.product(ADJECTIVES, NOUNS, VERBS, ADVERBS)
    ],
    dtype=np.uint16,
)
# RULER's filler of variable tracking, uint16 [1, 24]
NOISE = np.array(
    [
        encoded(
            "the grass is green . the sky is blue . the sun is yellow . here we go . "
            "there and back again ."
        )
    ],
    dtype=np.uint16,
)


def problem_names(rng: random.Random, asked: int, others: int) -> list[Name]:
    """Draw different names of a problem: held-out ones for the question, then others.

    Raises:
        DataError: There are not enough names.
    """
    for needed, names in ((asked, HELD_OUT_NAMES), (others, TRAINING_NAMES)):
        if needed > len(names):
            raise DataError(f"{needed} names are needed and there are {len(names)}; hide less")
    return [*rng.sample(HELD_OUT_NAMES, asked), *rng.sample(TRAINING_NAMES, others)]


def drawn_counts(
    rng: random.Random, most: int, fits: Callable[[int, int], bool]
) -> tuple[int, int]:
    """Draw how many things a document hides (log-uniform) and how many it asks for.

    Args:
        rng: Draws both, from 1 on.
        most: Most hidden things.
        fits: Function that tells if numbers of things and of questions fit into a document; one of
            each must fit.
    """
    largest = max(n for n in range(1, most + 1) if n == 1 or fits(n, 1))
    count = int(math.exp(rng.uniform(0, math.log(largest + 1))))
    return count, rng.randint(1, max(n for n in range(1, count + 1) if n == 1 or fits(count, n)))


def drawn_lines(rng: random.Random, context: int, taken: int, line: int) -> int:
    """Draw the number of filler lines of a training document, from none to a full context.

    Short documents are the most frequent ones, because a model first learns from them what to look
    for. Between the length without filler and the context, the logarithm of a document's length is
    distributed like the square of a uniform number.

    Args:
        rng: Draws the number.
        context: Most tokens of the document.
        taken: Tokens beside the filler.
        line: Tokens of a line.

    Raises:
        DataError: The lines to hide do not fit.
    """
    most = lines_that_fit(context, taken, line)
    size = taken * ((context + 1) / taken) ** rng.random() ** 2
    return min(most, int(size - taken) // line)


def lines_that_fit(context: int, taken: int, line: int) -> int:
    """Return the number of filler lines that fit beside `taken` tokens.

    Raises:
        DataError: The lines to hide do not fit.
    """
    if taken > context:
        raise DataError(
            f"--context {context}: a problem without its filler has {taken} tokens; raise it, or "
            "hide less"
        )
    return (context - taken) // line


def scattered(filler: Tokens, hidden: Sequence[Sequence[int]], positions: Sequence[int]) -> Tokens:
    """Return filler with lines in between.

    Args:
        filler: uint16 [lines, tokens].
        hidden: Token ids of each line to hide.
        positions: Number of filler lines before each hidden line, ascending.

    Returns:
        uint16 [tokens].
    """
    parts, start = [], 0
    for line, position in zip(hidden, positions, strict=True):
        parts += [filler[start:position].reshape(-1), np.array(line, dtype=np.uint16)]
        start = position
    return np.concatenate([*parts, filler[start:].reshape(-1)])


def asked(marker: str, text: Tokens, parts: Sequence[Sequence[int]]) -> Tokens:
    """Return a prompt: the task's word, a text, and the parts of a question; uint16 [tokens]."""
    start = np.array([ID[marker]], dtype=np.uint16)
    question = [ID["?"], *joined(parts), ID[":"]]
    return np.concatenate([start, text, np.array(question, dtype=np.uint16)])


def answered(prompt: Tokens, parts: Sequence[Sequence[int]]) -> Tokens:
    """Return a prompt with the parts of its answer and `<eod>`; uint16 [tokens]."""
    answer = [ID["ANS"], *joined(parts), ID[EOD]]
    return np.concatenate([prompt, np.array(answer, dtype=np.uint16)])


def joined(parts: Sequence[Sequence[int]]) -> list[int]:
    """Join token ids with commas between the parts."""
    return [token for part in parts for token in (*part, ID[","])][:-1]
