"""Equations in the format of `algebra__linear_1d` of DeepMind's mathematics data set.

`Solve -21*l + 207 = 43*l + 5*l for l.`: each side is a sum of terms in any order. A coefficient
of one is not written, an empty side is 0, and the answer is a whole number. Numbers are smaller
than in the public files, so that a small model can learn them.
"""

from __future__ import annotations

import random

from dms_train.data_prep.exam_sheets import VARIABLES, HeldOutSheet


def linear_1d_problems(count: int, n: int, seed: int) -> list[HeldOutSheet]:
    """Draw `count` sheets of n questions; the same seed gives the same sheets."""
    rng = random.Random(seed)
    sheets = []
    for _ in range(count):
        drawn = [_problem(rng) for _ in range(n)]
        lines = "".join(f"{i}: {question}\n" for i, (question, _) in enumerate(drawn, 1))
        sheets.append(HeldOutSheet(lines + "Solution 1.", tuple(answer for _, answer in drawn)))
    return sheets


def _problem(rng: random.Random) -> tuple[str, int]:
    variable, answer = rng.choice(VARIABLES), rng.randint(-30, 30)
    left, right = (rng.randint(-40, 40) for _ in range(2))
    while left == right:
        right = rng.randint(-40, 40)
    constant = rng.randint(-80, 80)
    # left * v + constant = right * v + moved
    moved = constant + (left - right) * answer
    sides = [_side(rng, left, constant, variable), _side(rng, right, moved, variable)]
    return f"Solve {sides[0]} = {sides[1]} for {variable}.", answer


def _side(rng: random.Random, coefficient: int, constant: int, variable: str) -> str:
    terms = [(part, variable) for part in _parts(rng, coefficient)]
    terms += [(part, "") for part in _parts(rng, constant)]
    rng.shuffle(terms)
    return _sum(terms) if terms else "0"


def _parts(rng: random.Random, total: int) -> list[int]:
    """Draw one or two numbers other than 0 that add up to `total`; none for 0."""
    first = rng.randint(-40, 40) if rng.random() < 0.4 else 0
    return [part for part in (first, total - first) if part != 0]


def _sum(terms: list[tuple[int, str]]) -> str:
    text = ""
    for value, variable in terms:
        sign = "-" if value < 0 else "+"
        size = f"{abs(value)}*{variable}" if variable and abs(value) > 1 else variable or abs(value)
        text += f" {sign} {size}"
    return text.removeprefix(" + ").replace(" - ", "-", 1) if text[1] == "-" else text[3:]
