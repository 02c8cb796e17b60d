"""GPQA Diamond: 198 questions of physics, chemistry and biology with four choices.

The authors ask not to publish the items in clear: reports leave out what a model wrote about them.
"""

from __future__ import annotations

import random

from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.tasks.base import Document, Messages, Row, Task
from dms_train.evaluation.tasks.data_files import DataSource

_LETTERS = "ABCD"
# the template of simple-evals, which open-r1 uses (paper, appendix F)
_TEMPLATE = (
    "Answer the following multiple choice question. The last line of your response should be of "
    "the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think "
    "step by step before answering.\n\n"
)


class GpqaDiamond(Task):
    """The choices of each question are in an order drawn from `task.seed` and its id."""

    name = "gpqa_diamond"
    title = "GPQA Diamond"
    scorer = "letter"
    publishable = False
    where = "the file is gpqa_diamond.csv of Idavidrein/gpqa, whose terms must be accepted"
    source = DataSource(
        repo="Idavidrein/gpqa",
        file="gpqa_diamond.csv",
        rows=198,
    )

    def document(self, row: Row, options: TaskOptions) -> Document:
        """Read columns `Question`, `Correct Answer` and `Incorrect Answer 1` to `3`."""
        name = str(row.get("Record ID") or row["number"] - 1)
        right = row["Correct Answer"].strip()
        choices = [right, *(row[f"Incorrect Answer {n}"].strip() for n in (1, 2, 3))]
        if len(set(choices)) != len(choices):
            raise ValueError("two choices are the same")
        random.Random(f"{options.seed}:{name}").shuffle(choices)
        return Document(
            id=name,
            question=row["Question"].strip(),
            gold=(_LETTERS[choices.index(right)],),
            details={"choices": choices},
        )

    def messages(self, document: Document) -> Messages:
        """Return the template with the question and its choices."""
        lines = zip(_LETTERS, document.details["choices"], strict=True)
        choices = "\n".join(f"{letter}) {choice}" for letter, choice in lines)
        return Messages(user=f"{_TEMPLATE}{document.question}\n\n{choices}")
