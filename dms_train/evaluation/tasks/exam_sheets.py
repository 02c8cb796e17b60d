"""Exam sheets: several linear equations first, then a worked solution of each.

The sheets are those of the embedded model; `dms-data exam-problems` makes the file.
"""

from __future__ import annotations

from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.tasks.base import Document, Messages, Row, Task


class ExamSheets(Task):
    """Rows with a prompt, its answers and the text that ends a sheet."""

    name = "exam_sheets"
    title = "Exam sheets"
    scorer = "sheet"
    where = "dms-data exam-problems --out FILE --sheets 100 makes one"

    def document(self, row: Row, options: TaskOptions) -> Document:
        """Columns `prompt`, `answers` and, if there is one, `stop`."""
        answers = row["answers"]
        if not isinstance(answers, list) or not answers or not isinstance(row["prompt"], str):
            raise ValueError("prompt must be a text, and answers a list that is not empty")
        return Document(
            id=str(row.get("id", row["number"] - 1)),
            question=row["prompt"],
            gold=tuple(str(answer) for answer in answers),
            details={"stop": row["stop"]} if row.get("stop") else {},
        )

    def messages(self, document: Document) -> Messages:
        """The sheet itself."""
        return Messages(user=document.question, plain=True)

    def stop(self, document: Document) -> tuple[str, ...]:
        """The end of a sheet."""
        return (document.details["stop"],) if "stop" in document.details else ()
