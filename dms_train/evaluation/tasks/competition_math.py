"""Competition problems whose answers are expressions: AIME and MATH-500."""

from __future__ import annotations

import math
from typing import ClassVar

from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.tasks.base import Document, Messages, Row, Task

# open-r1's MATH_QUERY_TEMPLATE (paper, appendix F)
_TEMPLATE = (
    "Solve the following math problem efficiently and clearly.  The last line of your response "
    "should be of the following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope "
    "it is correct' (without quotes) where ANSWER is just the final number or expression that "
    "solves the problem. Think step by step before answering.\n\n"
)


class CompetitionMath(Task):
    """Rows with a problem and its answer; the prompt asks for a box.

    Attributes:
        id_columns: The first of these columns in a row names the document; without one, the number
            of the row does.
    """

    scorer = "expression"
    id_columns: ClassVar[tuple[str, ...]] = ("unique_id", "id", "source")

    def document(self, row: Row, options: TaskOptions) -> Document:
        """Read columns `problem` (or `question`) and `answer`."""
        question = row["question"] if "question" in row else row["problem"]
        answer = row["answer"]
        if type(answer) is int or (type(answer) is float and math.isfinite(answer)):
            answer = str(answer)
        if not all(isinstance(text, str) and text.strip() for text in (question, answer)):
            raise ValueError("problem and answer must be texts that are not empty")
        name = next((row[key] for key in self.id_columns if row.get(key) is not None), None)
        return Document(
            id=str(row["number"] - 1 if name is None else name),
            question=question,
            gold=(answer.strip(),),
        )

    def messages(self, document: Document) -> Messages:
        """Return the prompt of open-r1."""
        return Messages(user=_TEMPLATE + document.question)
