"""Base of the tasks whose files hold whole prompts and the words of the answer."""

from __future__ import annotations

from pathlib import Path

from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.tasks.base import Document, Messages, Row, Task

FIXTURES = Path(__file__).parent / "fixtures"


class WordProblems(Task):
    """Task whose file holds the whole prompt; the answer follows the last `ANS`."""

    scorer = "words"
    fixtures = FIXTURES

    def document(self, row: Row, options: TaskOptions) -> Document:
        """Read the columns `prompt` and `answers`; all others are details."""
        prompt, answers = row["prompt"], row["answers"]
        if not isinstance(prompt, str) or not isinstance(answers, list) or not answers:
            raise ValueError("prompt must be a text, and answers a list that is not empty")
        apart = ("id", "number", "prompt", "answers")
        return Document(
            id=str(row.get("id", row["number"] - 1)),
            question=prompt,
            gold=tuple(str(answer) for answer in answers),
            details={key: value for key, value in row.items() if key not in apart},
        )

    def messages(self, document: Document) -> Messages:
        """Return the words of the file."""
        return Messages(user=document.question, plain=True)
