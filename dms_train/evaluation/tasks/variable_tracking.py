"""Variable tracking of RULER with 40 chains and 0 hops in repeated text (paper, appendix F.2).

RULER puts an example in front of the question; the paper evaluates zero-shot, and so does this
task. No two chains have the same value, and the chains stand at random lines.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.tasks.base import (
    Aggregate,
    Document,
    Messages,
    Row,
    Task,
    TaskSampling,
    TokenCounter,
)
from dms_train.evaluation.tasks.haystack import largest_fit, unlike

ANSWER_TOKENS = 30
CHAINS = 40
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_LETTERS = 5


class VariableTracking(Task):
    """Name the variables that hold the value of the first chain."""

    name = "variable_tracking"
    title = "VT"
    scorer = "contains"
    where = "it is generated"
    aggregate = Aggregate.MEAN
    sampling = TaskSampling(temperature=0.0, top_p=1.0, max_tokens=ANSWER_TOKENS)
    scores_truncated = True

    def generate(self, options: TaskOptions, tokens: TokenCounter) -> Iterator[Row]:
        """Yield prompts that fill `options.context_length` tokens together with their answers."""
        lines = None
        for number in range(options.count):
            seed = f"{options.seed}:{number}"
            row, lines = _row(seed, options.context_length, tokens, near=lines)
            yield row

    def document(self, row: Row, options: TaskOptions) -> Document:
        """Read columns `context`, `query` and `answers`."""
        return Document(
            id=str(row["number"] - 1),
            question=row["context"],
            gold=tuple(row["answers"]),
            details={"query": row["query"]},
        )

    def messages(self, document: Document) -> Messages:
        """Return RULER's template, with its spelling of 2025."""
        return _messages(document.question, document.details["query"], len(document.gold))


def assignments(rng: random.Random) -> list[tuple[str, str]]:
    """Draw variables of five capitals and numbers of five digits; none occurs twice."""
    names = unlike(lambda r: "".join(r.choices(string.ascii_uppercase, k=_LETTERS)), rng)
    values = unlike(lambda r: str(r.randint(10_000, 99_998)), rng)
    return [(next(names), next(values)) for _ in range(CHAINS)]


def scattered(chains: list[tuple[str, str]], lines: int, rng: random.Random) -> str:
    """Return assignments between `lines` lines of noise."""
    text = [NOISE] * lines
    for name, value in chains:
        text.insert(rng.randint(0, len(text)), f"VAR {name} = {value}")
    return "\n".join(text)


def _row(seed: str, length: int, tokens: TokenCounter, near: int | None) -> tuple[Row, int]:
    """Return a row that fills `length` tokens, and its lines of noise; `near` begins the search."""
    chains = assignments(random.Random(seed))
    name, value = chains[0]

    def context(lines: int) -> str:
        return scattered(chains, lines, random.Random(f"{seed}:lines"))

    def prompt_tokens(lines: int) -> int:
        return tokens(_messages(context(lines), value))

    lines = largest_fit(prompt_tokens, length - ANSWER_TOKENS, "variable_tracking", near)
    return {"context": context(lines), "query": value, "answers": [name]}, lines


def _messages(context: str, value: str, variables: int = 1) -> Messages:
    return Messages(
        user="Memorize and track the chain(s) of variable assignment hidden in the following "
        f"text.\n\n{context}\nQuestion: Find all variables that are assigned the value {value} in "
        "the text above.",
        answer_prefix=" Answer: According to the chain(s) of variable assignment in the text "
        f"above, {variables} variables are assigned the value {value}, they are: ",
    )
