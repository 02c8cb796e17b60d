"""Linear equations with one unknown in the lab's words, solved step by step.

A document is an equation, the working and the answer:

    E 7 * q - 3 + 2 * q = 48 + 4 * q + 9 ? q :
    7 + 2 = 9 . 9 - 4 = 5 : 3 + 48 = 51 . 51 + 9 = 60 : ...

The terms with the unknown are collected on the left, in the order in which they stand, and the
numbers on the right; the right side over the left one is the answer:

    ... : 60 / 5 = 12 . ANS 12 <eod>

The form follows `algebra__linear_1d` of DeepMind's mathematics data set, with longer sides.
Numbers, sums and answers are from 1 to 100, each one word. Training documents have 2 to 20 terms
of each kind, as many of one as of the other; problems have as many as they are asked for.

A solver must remember each term until it is collected, once, while the working passes over
the equation twice. One equation in sixteen is held out by a hash of its words.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.word_tokenizer import EOD
from dms_train.data.errors import DataError
from research.data.token_documents import Drawn
from research.data.words import ID, LARGEST, LETTERS, NUMBER, decoded

FEWEST_TERMS, MOST_TERMS = 2, 20  # numbers of terms of each kind

_PLUS, _MINUS, _TIMES, _OVER = (ID[word] for word in "+-*/")
_EQUALS, _STOP, _COLON = ID["="], ID["."], ID[":"]


def _sums(rng: random.Random, count: int, last: int) -> list[int]:
    """Draw the sums of the first 1 to `count` terms, from 1 to 100; neighbours differ."""
    partial_sums = [last]
    while len(partial_sums) < count:
        drawn = rng.randint(1, LARGEST - 1)
        partial_sums.append(drawn + (drawn >= partial_sums[-1]))
    return partial_sums[::-1]


def _terms(partial_sums: list[int]) -> list[int]:
    """Return the numbers other than 0 that have these sums."""
    return [partial_sums[0], *(after - before for before, after in pairwise(partial_sums))]


def _equation(rng: random.Random, factors: list[int], numbers: list[int]) -> list[int]:
    """Draw a prompt whose terms are mixed; each kind keeps the given order.

    Args:
        rng: Draws the unknown, the order and the sides.
        factors: Factors of the unknown, with the signs of the left side.
        numbers: Numbers, with the signs of the right side.
    """
    unknown = ID[rng.choice(LETTERS)]
    kinds = [False] * len(numbers) + [True] * len(factors)
    rng.shuffle(kinds)
    cut = rng.randint(1, len(kinds) - 1)  # terms on the left side
    left, right = iter(factors), iter(numbers)
    prompt = [ID["E"]]
    for index, of_unknown in enumerate(kinds):
        is_left = index < cut
        value = next(left if of_unknown else right) * (1 if of_unknown == is_left else -1)
        if index == cut:
            prompt.append(_EQUALS)
        if value < 0 or index not in (0, cut):
            prompt.append(_MINUS if value < 0 else _PLUS)
        prompt += [NUMBER + abs(value), *((_TIMES, unknown) if of_unknown else ())]
    return [*prompt, ID["?"], unknown, _COLON]


def _collected(partial_sums: list[int]) -> list[int]:
    """Return the working of one side, such as `7 + 2 = 9 . 9 - 4 = 5 :`."""
    words: list[int] = []
    for before, after in pairwise(partial_sums):
        sign, size = (_PLUS if after > before else _MINUS), abs(after - before)
        words += [NUMBER + before, sign, NUMBER + size, _EQUALS, NUMBER + after, _STOP]
    words[-1] = _COLON
    return words


def _document(rng: random.Random, terms: int) -> tuple[list[int], list[int], int]:
    """Draw prompt, working and answer of an equation; also return its solution."""
    factor = rng.randint(1, 20)
    solution = rng.randint(1, LARGEST // factor)
    lefts, rights = _sums(rng, terms, factor), _sums(rng, terms, factor * solution)
    prompt = _equation(rng, _terms(lefts), _terms(rights))
    quotient = [NUMBER + rights[-1], _OVER, NUMBER + factor, _EQUALS, NUMBER + solution, _STOP]
    end = [ID["ANS"], NUMBER + solution, ID[EOD]]
    return prompt, [*_collected(lefts), *_collected(rights), *quotient, *end], solution


def _drawn(
    rng: random.Random, terms: int, *, held_out: bool = False
) -> tuple[list[int], list[int], int]:
    """Draw documents until one belongs to the split."""
    while True:
        document = _document(rng, terms)
        if is_held_out(" ".join(decoded(np.array(document[0])))) == held_out:
            return document


def is_held_out(prompt: str) -> bool:
    """Return whether no training document has this equation."""
    digest = hashlib.sha256(f"equation:{prompt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 16 == 0


@dataclass(frozen=True, slots=True)
class LabLinear1d:
    """Training documents of equations that are not held out."""

    @property
    def settings(self) -> dict[str, Any]:
        """Values that determine the documents, besides the seed."""
        return {"task": "lab_linear_1d", "fewest_terms": FEWEST_TERMS, "most_terms": MOST_TERMS}

    def draw(self, rng: random.Random) -> Drawn:
        """Draw a document that is not held out."""
        prompt, working, _ = _drawn(rng, rng.randint(FEWEST_TERMS, MOST_TERMS))
        return Drawn(np.array([*prompt, *working], dtype=np.uint16), prompt=len(prompt))


def held_out_problems(count: int, seed: int, *, terms: int = MOST_TERMS) -> list[dict[str, Any]]:
    """Draw different held-out equations.

    Args:
        count: Number of equations.
        seed: The same seed gives the same problems.
        terms: Terms of each kind.

    Raises:
        DataError: Training documents have other numbers of terms.
    """
    if not FEWEST_TERMS <= terms <= MOST_TERMS:
        raise DataError(f"--terms {terms}: not from {FEWEST_TERMS} to {MOST_TERMS}")
    rng, problems = random.Random(seed), dict[str, dict[str, Any]]()
    while len(problems) < count:
        prompt, _, solution = _drawn(rng, terms, held_out=True)
        text = " ".join(decoded(np.array(prompt)))
        problems[text] = {"prompt": text, "answers": [str(solution)]}
    return list(problems.values())
