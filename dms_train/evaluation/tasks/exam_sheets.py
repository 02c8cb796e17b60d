"""Exam sheets: several linear equations first, then a worked solution of each.

The embedded model solves such sheets; `dms-data exam-problems` makes the file.
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
        """Return the sheet of a row with `prompt`, `answers` and optionally `stop`."""
        prompt, answers, stop = row["prompt"], row["answers"], row.get("stop")
        if not _is_text(prompt):
            raise ValueError('"prompt" must be a text that is not empty')
        if not isinstance(answers, list) or not answers or not all(map(_is_text, answers)):
            raise ValueError('"answers" must be a list of texts, such as ["15"]')
        if stop is not None and not _is_text(stop):
            raise ValueError('"stop" must be a text that is not empty, or absent')
        return Document(
            id=str(row.get("id", row["number"] - 1)),
            question=prompt,
            gold=tuple(answers),
            details={} if stop is None else {"stop": stop},
        )

    def messages(self, document: Document) -> Messages:
        """Return the sheet itself."""
        return Messages(user=document.question, plain=True)

    def stop(self, document: Document) -> tuple[str, ...]:
        """Return the end of a sheet."""
        return (document.details["stop"],) if "stop" in document.details else ()


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)
