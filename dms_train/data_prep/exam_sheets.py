r"""Exam sheets: synthetic text whose answers depend on tokens far back in the context.

A sheet first has n linear equations and then n worked solutions, so every solution needs an
earlier question:

    1: Solve 4*c + 15 = 6*c - 15 for c.
    2: Solve -11*r - 21 = 4*r - 186 for r.
    Solution 1. Collect terms: 4*c - 6*c = -15 - 15.
    So -2*c = -30.
    Divide: c = -30 / -2.
    The final answer is 15.
    Solution 2. Collect terms: -11*r - 4*r = -186 + 21.
    ...

A blank line ends the sheet. In `a*v + b = c*v + d`, a and c lie in [-12, 12] without 0, a != c,
b in [-40, 40] and the answer in [-15, 15]. Every number is written out, including 1 and 0. A hash
of (a, b, c, d) holds out one equation in ten. It occurs in no training sheet under any variable
name.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Literal, NamedTuple

ALPHABET = "\n *+-./:=0123456789CDSTabcdefghijklmnopqrstuvwxyz"
VARIABLES = "abcdghjkmnpqrstuwxyz"

Split = Literal["train", "held_out"]

_COEFFICIENTS = [value for value in range(-12, 13) if value != 0]


@dataclass(frozen=True, slots=True)
class ExamProblem:
    """The equation `a*variable + b = c*variable + d`."""

    a: int
    b: int
    c: int
    d: int
    variable: str

    @property
    def answer(self) -> int:
        """Value of the variable."""
        return (self.d - self.b) // (self.a - self.c)

    @property
    def held_out(self) -> bool:
        """Return whether the equation is excluded from training."""
        key = f"{self.a},{self.b},{self.c},{self.d}".encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % 10 == 0

    @property
    def question(self) -> str:
        """Question line without its number and newline."""
        v = self.variable
        left = f"{self.a}*{v} {_signed(self.b)}"
        return f"Solve {left} = {self.c}*{v} {_signed(self.d)} for {v}."

    @property
    def solution(self) -> str:
        """Return the text after `Solution <number>.`, four lines with their newlines."""
        v = self.variable
        factor, constant = self.a - self.c, self.d - self.b
        return (
            f" Collect terms: {self.a}*{v} {_signed(-self.c)}*{v} = {self.d} {_signed(-self.b)}.\n"
            f"So {factor}*{v} = {constant}.\n"
            f"Divide: {v} = {constant} / {factor}.\n"
            f"The final answer is {self.answer}.\n"
        )


class HeldOutSheet(NamedTuple):
    """A question sheet for evaluation.

    Attributes:
        prompt: The questions and `Solution 1.`, where a model continues.
        answers: The answer to each question in order.
    """

    prompt: str
    answers: tuple[int, ...]


def problem(rng: random.Random, split: Split) -> ExamProblem:
    """Draw one equation of a split; answers are uniform in [-15, 15]."""
    while True:
        a, c = rng.choice(_COEFFICIENTS), rng.choice(_COEFFICIENTS)
        b, answer = rng.randint(-40, 40), rng.randint(-15, 15)
        drawn = ExamProblem(a, b, c, b + (a - c) * answer, rng.choice(VARIABLES))
        if a != c and drawn.held_out == (split == "held_out"):
            return drawn


def sheet(rng: random.Random, n: int, split: Split) -> str:
    """Return the text of a sheet with n questions; raise ValueError if n is below 1."""
    problems = _problems(rng, n, split)
    solutions = (f"Solution {i}.{p.solution}" for i, p in enumerate(problems, 1))
    return _questions(problems) + "".join(solutions) + "\n"


def document(rng: random.Random, length: int, n_range: tuple[int, int], end: str) -> str:
    """Return sheets in a row, each followed by `end`, cut after `length` tokens.

    Every character is a token, and so is `end`. When documents are as long as training samples,
    every sample begins with a sheet and contains the questions that its solutions need.
    """
    tokens: list[str] = []
    while len(tokens) < length:
        tokens += [*sheet(rng, rng.randint(*n_range), "train"), end]
    return "".join(tokens[:length])


def held_out_problems(count: int, n: int, seed: int) -> list[HeldOutSheet]:
    """Draw `count` sheets of n held-out questions; the same seed gives the same sheets."""
    rng = random.Random(seed)
    drawn = [_problems(rng, n, "held_out") for _ in range(count)]
    return [
        HeldOutSheet(_questions(problems) + "Solution 1.", tuple(p.answer for p in problems))
        for problems in drawn
    ]


def _problems(rng: random.Random, n: int, split: Split) -> list[ExamProblem]:
    if n < 1:
        raise ValueError(f"a sheet needs at least one question, not {n}")
    return [problem(rng, split) for _ in range(n)]


def _questions(problems: list[ExamProblem]) -> str:
    return "".join(f"{i}: {p.question}\n" for i, p in enumerate(problems, 1))


def _signed(value: int) -> str:
    return f"- {-value}" if value < 0 else f"+ {value}"
