"""Needle in a haystack in the lab's words: numbers to be recalled by their key.

A document hides needles between sentences and asks for some of them, in random order:

    N the old river turns slowly . KEY q d = 17 4 92 . the warm stone rests often .
    KEY x m = 3 88 20 . ... ? x m , q d : ANS x m = 3 88 20 , q d = 17 4 92 <eod>

It follows RULER's `niah_single_2` where the words allow: keys are two letters, values three
numbers below 100, the text is made of 4,096 sentences, and an answer repeats its key. Training
documents have 1 to 64 needles and ask for 1 to all of them, so that a long text teaches more than
one answer; they have no filler to as much as fits into the context. Problems fill the context, ask
for one needle at one of RULER's 40 depths, and their other needles have other keys.

A solver must remember the keys and values, a few tokens of a long text. Asked keys are held
out by a hash (`haystacks`).
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from research.data.haystacks import (
    SENTENCES,
    TRAINING_NAMES,
    Name,
    answered,
    asked,
    drawn_counts,
    drawn_lines,
    lines_that_fit,
    problem_names,
    scattered,
)
from research.data.token_documents import Drawn, Tokens
from research.data.words import ID, NUMBER, decoded

MOST_NEEDLES = 64
DEPTHS = tuple(round(100 * step / 39) for step in range(40))  # percent, as in RULER

_KEY, _EQUALS, _STOP = ID["KEY"], ID["="], ID["."]
_VALUES = range(NUMBER, NUMBER + 100)


class Needle(NamedTuple):
    """Hidden key and value, as token ids."""

    key: Name
    value: tuple[int, ...]

    @property
    def line(self) -> list[int]:
        """Sentence that states the needle."""
        return [_KEY, *self.answer, _STOP]

    @property
    def answer(self) -> list[int]:
        """Key with its value."""
        return [*self.key, _EQUALS, *self.value]


def _needles(rng: random.Random, keys: list[Name]) -> list[Needle]:
    return [Needle(key, tuple(rng.choices(_VALUES, k=3))) for key in keys]


def _text(rng: random.Random, needles: list[Needle], positions: list[int], lines: int) -> Tokens:
    """Return filler sentences with needles after the given numbers of them; uint16 [tokens]."""
    filler = SENTENCES[rng.choices(range(len(SENTENCES)), k=lines)]
    order = sorted(zip(positions, [needle.line for needle in needles], strict=True))
    return scattered(filler, [line for _, line in order], [position for position, _ in order])


def _tokens(needles: int, questions: int) -> int:
    """Return the tokens of a document without its filler."""
    return 1 + 8 * needles + (3 * questions + 1) + (7 * questions + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabNiah:
    """Training documents without held-out keys.

    Attributes:
        context: Most tokens of a document.
    """

    context: int = 2048

    @property
    def settings(self) -> dict[str, Any]:
        """Values that determine the documents, besides the seed."""
        return {"task": "lab_niah", **asdict(self), "most_needles": MOST_NEEDLES}

    def draw(self, rng: random.Random) -> Drawn:
        """Draw a document without held-out keys.

        Raises:
            DataError: The context is too short.
        """
        count, questions = drawn_counts(
            rng, MOST_NEEDLES, lambda n, asked: _tokens(n, asked) <= self.context
        )
        needles = _needles(rng, rng.sample(TRAINING_NAMES, count))
        lines = drawn_lines(rng, self.context, _tokens(count, questions), SENTENCES.shape[1])
        text = _text(rng, needles, [rng.randint(0, lines) for _ in needles], lines)
        chosen = rng.sample(needles, questions)
        prompt = asked("N", text, [needle.key for needle in chosen])
        tokens = answered(prompt, [needle.answer for needle in chosen])
        return Drawn(tokens, prompt=len(prompt))


def held_out_problems(
    count: int, seed: int, *, context: int, needles: int = 1
) -> list[dict[str, Any]]:
    """Draw texts that ask for one needle with a held-out key.

    Args:
        count: Number of texts.
        seed: The same seed gives the same problems.
        context: Tokens of a prompt and its answer, less than a sentence under it.
        needles: Number of needles in each text.

    Raises:
        DataError: The needles do not fit, or there are not enough keys.
    """
    lines = lines_that_fit(context, _tokens(needles, 1), SENTENCES.shape[1])
    return [_problem(random.Random(f"{seed} {number}"), lines, needles) for number in range(count)]


def _problem(rng: random.Random, lines: int, count: int) -> dict[str, Any]:
    needles = _needles(rng, problem_names(rng, 1, count - 1))
    depth = rng.choice(DEPTHS)
    positions = [lines * depth // 100, *(rng.randint(0, lines) for _ in needles[1:])]
    prompt = asked("N", _text(rng, needles, positions, lines), [needles[0].key])
    return {
        "prompt": " ".join(decoded(prompt)),
        "answers": [" ".join(decoded(np.array(needles[0].answer)))],
        "depth": depth,
    }
