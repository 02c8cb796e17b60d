"""Variable tracking in the lab's words: which variables hold a value?

A document hides chains of assignments between lines of noise and asks for some of the chains by
their value; the answer has the value and all names of a chain in order:

    V the grass is green . ... VAR 17 42 > q d . the grass ... VAR q d > x m . ...
    VAR 5 91 > p a . ... ? 17 42 , 5 91 : ANS 17 42 > q d > x m , 5 91 > p a <eod>

It follows RULER where the words allow: a name is two letters, a value two numbers below 100, and
the noise is RULER's text. The value stands before the name that takes it, in the text and in the
answer. Training documents have 0 to 4 hops, at most 40 assignments, and ask for 1 to all of their
chains, so that a long text teaches more than one answer; they have no noise to as much as fits into
the context. Problems fill the context and ask for one chain. An answer is right when the whole
chain is, where RULER counts each name.

A solver must remember every assignment until its value is asked for. The names of an asked
chain are held out by a hash (`haystacks`).
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from research.data.haystacks import (
    NOISE,
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

MOST_HOPS = 4
MOST_ASSIGNMENTS = 40

_VAR, _TO, _STOP = ID["VAR"], ID[">"], ID["."]
_LINE = 7  # number of tokens of an assignment
_BASE = 100  # base of the two numbers of a value


class Chain(NamedTuple):
    """Variables of one value, as token ids.

    Attributes:
        names: Variables in the order of the assignments.
        value: Two numbers.
    """

    names: list[Name]
    value: tuple[int, int]

    @property
    def lines(self) -> list[list[int]]:
        """Assignments of the chain."""
        sources = [self.value, *self.names]
        pairs = zip(self.names, sources, strict=False)
        return [[_VAR, *source, _TO, *name, _STOP] for name, source in pairs]

    @property
    def answer(self) -> list[int]:
        """Value and all names."""
        return [*self.value, *(token for name in self.names for token in (_TO, *name))]


def _values(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Draw different values."""
    drawn = rng.sample(range(_BASE**2), count)
    return [(NUMBER + value // _BASE, NUMBER + value % _BASE) for value in drawn]


def _chains(rng: random.Random, names: list[Name], length: int) -> list[Chain]:
    """Draw chains of `length` names each."""
    groups = [names[start : start + length] for start in range(0, len(names), length)]
    values = _values(rng, len(groups))
    return [Chain(group, value) for group, value in zip(groups, values, strict=True)]


def _text(rng: random.Random, chains: list[Chain], noise: int) -> Tokens:
    """Place assignments at random lines of noise, each chain in order; uint16 [tokens]."""
    length = len(chains[0].names)
    turns = [number for number in range(len(chains)) for _ in range(length)]
    rng.shuffle(turns)
    left = [iter(chain.lines) for chain in chains]
    positions = sorted(rng.randint(0, noise) for _ in turns)
    hidden = [next(left[number]) for number in turns]
    return scattered(np.repeat(NOISE, noise, axis=0), hidden, positions)


def _tokens(chains: int, length: int, questions: int) -> int:
    """Return the tokens of a document without its noise."""
    question, answer = 3 * questions + 1, questions * (3 * length + 3) + 1
    return 1 + _LINE * chains * length + question + answer


@dataclass(frozen=True, slots=True, kw_only=True)
class LabVariableTracking:
    """Training documents without held-out names.

    Attributes:
        context: Most tokens of a document.
    """

    context: int = 2048

    @property
    def settings(self) -> dict[str, Any]:
        """Values that determine the documents, besides the seed."""
        most = {"most_hops": MOST_HOPS, "most_assignments": MOST_ASSIGNMENTS}
        return {"task": "lab_variable_tracking", **asdict(self), **most}

    def draw(self, rng: random.Random) -> Drawn:
        """Draw a document without held-out names.

        Raises:
            DataError: The context is too short.
        """
        length = rng.randint(1, MOST_HOPS + 1)
        most = MOST_ASSIGNMENTS // length
        count, questions = drawn_counts(
            rng, most, lambda n, asked: _tokens(n, length, asked) <= self.context
        )
        chains = _chains(rng, rng.sample(TRAINING_NAMES, count * length), length)
        noise = drawn_lines(rng, self.context, _tokens(count, length, questions), NOISE.size)
        chosen = rng.sample(chains, questions)
        prompt = asked("V", _text(rng, chains, noise), [chain.value for chain in chosen])
        return Drawn(answered(prompt, [chain.answer for chain in chosen]), prompt=len(prompt))


def held_out_problems(
    count: int, seed: int, *, context: int, chains: int = MOST_ASSIGNMENTS, hops: int = 0
) -> list[dict[str, Any]]:
    """Draw texts that ask for one chain of held-out names.

    Args:
        count: Number of texts.
        seed: The same seed gives the same problems.
        context: Tokens of a prompt and its answer, less than a line of noise under it.
        chains: Number of chains in each text.
        hops: Number of hops of each chain.

    Raises:
        DataError: The chains do not fit, or there are not enough names.
    """
    length = hops + 1
    noise = lines_that_fit(context, _tokens(chains, length, 1), NOISE.size)
    made = []
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        drawn_chains = _chains(rng, problem_names(rng, length, (chains - 1) * length), length)
        prompt = asked("V", _text(rng, drawn_chains, noise), [drawn_chains[0].value])
        names = decoded(np.array(drawn_chains[0].answer))
        made.append({"prompt": " ".join(decoded(prompt)), "answers": [" ".join(names)]})
    return made
