"""One-dimensional linear equations in the distribution of DeepMind's mathematics data set.

The generator follows `algebra__linear_1d` of Saxton et al. (2019) with the entropy of its training
split, 3 to 10; a file of the public generator can be given instead. Fewer than one equation in 20
has the form aX + b = cX + d that the DMS paper (appendix C) shows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.tasks.base import (
    Document,
    Messages,
    Row,
    Task,
    TaskSampling,
    TokenCounter,
)
from dms_train.evaluation.tasks.gsm8k import meta_prompt

_VARIABLES = "abcdfghijklmnopqrstuvwxyz"  # the original generator leaves out e too
_ENTROPY = (3.0, 10.0)


class Linear1d(Task):
    """`Solve -5*p - 5465 = 16*p - 5948 for p.` with whole numbers as answers."""

    name = "linear_1d"
    title = "linear_1d"
    scorer = "stated"
    where = "it is generated; a file of the public generator can be given"
    sampling = TaskSampling(temperature=0.0, top_p=1.0, max_tokens=1024)

    def generate(self, options: TaskOptions, tokens: TokenCounter) -> Iterator[Row]:
        """Yield different equations, drawn from `options.seed`."""
        rng, seen = random.Random(options.seed), set[str]()
        while len(seen) < options.count:
            question, answer = equation(rng)
            if question not in seen:
                seen.add(question)
                yield {"problem": question, "answer": str(answer)}

    def document(self, row: Row, options: TaskOptions) -> Document:
        """Read columns `problem` and `answer`."""
        answer = str(row["answer"]).strip()
        if not answer.removeprefix("-").isdecimal():
            raise ValueError(f"answer {answer!r}: not a whole number")
        return Document(
            id=str(row.get("source", row["number"] - 1)), question=row["problem"], gold=(answer,)
        )

    def messages(self, document: Document) -> Messages:
        """Return Meta's prompt, as in appendix C of the paper."""
        return meta_prompt(document.question)


def equation(rng: random.Random) -> tuple[str, int]:
    """Draw one equation and its solution."""
    entropy = rng.uniform(*_ENTROPY)
    spent = max(1.0, entropy / 4)
    answer = _integer(rng, spent)
    entropy = max(1.0, entropy - spent)
    share = rng.uniform(1 / 3, 2 / 3) * entropy
    factor = 0
    while factor == 0:
        factor = _integer(rng, max(1.0, share))
    variable = rng.choice(_VARIABLES)
    constant = -factor * answer  # factor * variable + constant = 0
    fewest = 2 + (constant != 0)
    terms = rng.randint(fewest, max(fewest, 1 + int(1 + entropy / 2)))
    of_variable = rng.randint(1, terms - (constant != 0))
    left, right = _Side(variable), _Side(variable)
    for total, count, is_variable in (
        (factor, of_variable, True),
        (constant, terms - of_variable, False),
    ):
        for part in _split(rng, total, count):
            side, value = rng.choice(((left, part), (right, -part)))
            side.add(value, is_variable)
    return f"Solve {left.text} = {right.text} for {variable}.", answer


def _integer(rng: random.Random, entropy: float) -> int:
    most = math.ceil(10**entropy / 2)
    return rng.randint(-most, most)


def _split(rng: random.Random, total: int, count: int) -> list[int]:
    """Draw `count` integers of about the size of `total` that add up to it."""
    if count == 0:
        return []
    most = max(1, 2 * abs(total))
    addends = [rng.randint(-most, most) for _ in range(count - 1)]
    return [*addends, total - sum(addends)]


class _Side:
    """One side of an equation; terms with the variable come first."""

    def __init__(self, variable: str) -> None:
        self._variable = variable
        self._factors: list[int] = []
        self._constants: list[int] = []

    def add(self, value: int, is_variable: bool) -> None:
        (self._factors if is_variable else self._constants).append(value)

    @property
    def text(self) -> str:
        terms = [(value, self._factor(abs(value))) for value in self._factors]
        terms += [(value, str(abs(value))) for value in self._constants]
        if not terms:
            return "0"
        (first, words), rest = terms[0], terms[1:]
        signed = "".join(f" {'-' if value < 0 else '+'} {text}" for value, text in rest)
        return f"{'-' if first < 0 else ''}{words}{signed}"

    def _factor(self, size: int) -> str:
        return self._variable if size == 1 else f"{size}*{self._variable}"
