"""Modular arithmetic with spot checks: a search for a common root whose answer may be wrong.

A document is a prompt, a trace and an answer, in words of one token each (`research.data.words`):

    M a = 40 * 7 , b = a + 31 , c = a * 12 , d = c + 5 , ... , i = e * 4 :
    a = 40 * 7 = 36 , b = 36 + 31 = 6 , c = 36 * 12 = 5 , ... , i = 17 * 4 = 7 :
    R 14 d : 14 + 10 = 24 * 14 = 31 + 17 = 48 * 14 = 1 + 3 = 4 .
    R 52 a : 52 + 36 = 27 * 52 = 1 + 6 = 7 * 52 = 59 + 5 = 3 .
    ...
    R 9 g : 9 + 20 = 29 * 9 = 17 + 50 = 6 * 9 = 54 + 7 = 0 !
    ANS 9 <eod>

All numbers are residues modulo 61. The prompt defines nine coefficients, each from a number or an
earlier coefficient. They belong to three equations, which are named by their first coefficient:
x^3 + a x^2 + b x + c = 0, and likewise from d and from g. Each has three roots, and the question is
the one root that all have in common. The trace computes the coefficients and then tries candidates
in random order, each once. A trial checks one random equation by Horner's rule. The first candidate
that passes its check (`!`) is the answer.

An answer may be wrong, and a vote helps. The common root passes any check, and each of the six
other roots passes one of three. The seven roots come in random order, so a trace ends in the common
root with probability (1 - (2/3)^7) / (7/3) = 0.404, in any other root with 0.099, and in nothing
else. Order and checks are uniform draws, so traces of one problem err independently at any
temperature. The majority answer of W traces is therefore right more often as W grows:
0.55, 0.71, 0.88 and 0.98 of the time for W = 4, 8, 16 and 32.

A solver must remember the coefficients, which are written once, at the start of the trace. It must
also remember the tried candidates, because trying one again costs tokens and gives a wrong root
another chance. The rest of a trial, nearly all tokens, is not needed again. A trace has about
100 to 1,660 tokens. One system in sixteen is held out by a hash of its roots: no training document
has it, in any order of its equations.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.word_tokenizer import EOD
from research.data.token_documents import Drawn, Tokens
from research.data.words import ID, LETTER, NUMBER, decoded

PRIME = 61
EQUATIONS = 3
DEGREE = 3
RIGHT = "right_answer"  # name in the statistics of a document with the right answer

_COEFFICIENTS = EQUATIONS * DEGREE
_INVERSE = (0, *(pow(number, -1, PRIME) for number in range(1, PRIME)))
_LINE = "R x e : x + c0 = s0 * x = p1 + c1 = s1 * x = p2 + c2 = s2 mark"  # one trial
_PLUS, _TIMES, _EQUALS = ID["+"], ID["*"], ID["="]
_COMMA, _COLON, _FAILS, _PASSES = ID[","], ID[":"], ID["."], ID["!"]


class System(NamedTuple):
    """Three equations with one common root.

    Attributes:
        root: The common root.
        others: Two further roots of each equation; all seven roots differ.
    """

    root: int
    others: tuple[tuple[int, ...], ...]

    @property
    def held_out(self) -> bool:
        """True if no training document has these equations, in any order."""
        parts = sorted(",".join(map(str, sorted(roots))) for roots in self.others)
        key = f"{self.root}:{';'.join(parts)}".encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % 16 == 0

    @property
    def coefficients(self) -> list[int]:
        """Coefficients of the powers 2, 1 and 0 of x in each equation."""
        coefficients = []
        for b, c in self.others:
            a = self.root
            coefficients += [
                -(a + b + c) % PRIME,
                (a * b + a * c + b * c) % PRIME,
                -a * b * c % PRIME,
            ]
        return coefficients


class Problem(NamedTuple):
    """System with the definitions of its coefficients in a prompt.

    Attributes:
        system: System to solve.
        prompt: Token ids that a trace follows.
        work: Token ids of the coefficients worked out, up to the first trial.
    """

    system: System
    prompt: list[int]
    work: list[int]


def system(rng: random.Random, *, held_out: bool = False) -> System:
    """Draw a system: different roots, uniform among those of the split."""
    while True:
        root, *others = rng.sample(range(PRIME), 1 + EQUATIONS * (DEGREE - 1))
        pairs = zip(others[::2], others[1::2], strict=True)
        drawn = System(root, tuple(pairs))
        if drawn.held_out == held_out:
            return drawn


def problem(rng: random.Random, system: System) -> Problem:
    """Draw definitions of the coefficients.

    Each is a sum or product of an earlier coefficient and a number; the first, of two numbers.
    """
    values = system.coefficients
    prompt, work = [ID["M"]], list[int]()
    for index, value in enumerate(values):
        if index:
            source = rng.randrange(index)
            left, word = values[source], LETTER + source
        else:
            left = rng.randrange(PRIME)
            word = NUMBER + left
        if left and rng.random() < 0.5:
            sign, right = _TIMES, value * _INVERSE[left] % PRIME
        else:
            sign, right = _PLUS, (value - left) % PRIME
        name, operand = LETTER + index, NUMBER + right
        prompt += (name, _EQUALS, word, sign, operand, _COMMA)
        work += (name, _EQUALS, NUMBER + left, sign, operand, _EQUALS, NUMBER + value, _COMMA)
    prompt[-1] = work[-1] = _COLON
    return Problem(system, prompt, work)


def trace(rng: random.Random, problem: Problem) -> tuple[Tokens, int]:
    """Draw trials of a problem.

    Returns:
        Prompt, trace, answer and `<eod>`, uint16 [tokens]; and the answer.
    """
    root, others = problem.system
    candidates = rng.sample(range(PRIME), PRIME)
    checked = rng.choices(range(EQUATIONS), k=PRIME)
    count = 1
    for candidate, equation in zip(candidates, checked, strict=True):
        if candidate == root or candidate in others[equation]:
            break
        count += 1
    lines = _trials(problem.system.coefficients, candidates[:count], checked[:count])
    answer = candidates[count - 1]
    end = [ID["ANS"], NUMBER + answer, ID[EOD]]
    tokens = np.empty(len(problem.prompt) + len(problem.work) + lines.size + 3, dtype=np.uint16)
    start = len(problem.prompt) + len(problem.work)
    tokens[:start] = problem.prompt + problem.work
    tokens[start:-3] = lines.reshape(-1)
    tokens[-3:] = end
    return tokens, answer


def _trials(
    coefficients: list[int], candidates: Sequence[int], checked: Sequence[int]
) -> npt.NDArray[np.uint16]:
    """Return lines of candidates in equations; uint16 [trials, tokens of a line]."""
    x, equation = np.array(candidates), np.array(checked)
    of_equations = np.array(coefficients).reshape(EQUATIONS, DEGREE)[equation]
    values = {"x": x}
    product = x
    for step in range(DEGREE):
        values[f"c{step}"] = of_equations[:, step]
        values[f"s{step}"] = (product + of_equations[:, step]) % PRIME
        product = values[f"s{step}"] * x % PRIME
        values[f"p{step + 1}"] = product
    passes = values[f"s{DEGREE - 1}"] == 0
    ids = {
        **{name: NUMBER + value for name, value in values.items()},
        "e": LETTER + DEGREE * equation,
        "mark": np.where(passes, _PASSES, _FAILS),
    }
    words = _LINE.split()
    lines = np.empty((len(x), len(words)), dtype=np.uint16)
    for column, word in enumerate(words):
        lines[:, column] = ids[word] if word in ids else ID[word]
    return lines


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Training documents of systems that are not held out."""

    @property
    def settings(self) -> dict[str, Any]:
        """Values that determine the documents, besides the seed."""
        sizes = {"prime": PRIME, "equations": EQUATIONS, "degree": DEGREE}
        return {"task": "arithmetic", **sizes}

    def draw(self, rng: random.Random) -> Drawn:
        """Draw a document, whose trait is `RIGHT` if its answer is the common root."""
        drawn = problem(rng, system(rng))
        tokens, answer = trace(rng, drawn)
        right = answer == drawn.system.root
        return Drawn(tokens, prompt=len(drawn.prompt), traits=(RIGHT,) if right else ())


def held_out_problems(count: int, seed: int) -> list[dict[str, Any]]:
    """Draw different held-out systems, with the common root of each.

    Args:
        count: Number of systems.
        seed: The same seed gives the same problems.
    """
    rng, problems = random.Random(seed), dict[System, dict[str, Any]]()
    while len(problems) < count:
        drawn = problem(rng, system(rng, held_out=True))
        words = decoded(np.array(drawn.prompt, dtype=np.uint16))
        row = {"prompt": " ".join(words), "answers": [str(drawn.system.root)]}
        problems.setdefault(drawn.system, row)
    return list(problems.values())
