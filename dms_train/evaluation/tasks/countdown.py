"""Countdown: reach a target with all numbers, by a search that the model writes out.

For models that were trained on the searches of `dms-data countdown`; its module describes them.
`dms-data countdown-problems` makes the file, of instances that no training document holds.
"""

from __future__ import annotations

from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.tasks.base import (
    Aggregate,
    Document,
    Messages,
    Row,
    Task,
    TaskSampling,
)


class Countdown(Task):
    """A document is solved if any of its chains ends in moves that are verified."""

    name = "countdown"
    title = "Countdown"
    scorer = "countdown"
    where = "dms-data countdown-problems --out FILE --problems 400 makes one"
    aggregate = Aggregate.ANY
    sampling = TaskSampling(temperature=0.6, top_p=1.0)

    def document(self, row: Row, options: TaskOptions) -> Document:
        """Columns `numbers`, `target`, `answer` and, if there is one, `solving_moves`."""
        numbers, target = row["numbers"], row["target"]
        if not isinstance(numbers, list) or not all(type(n) is int for n in [*numbers, target]):
            raise ValueError("numbers must be a list of whole numbers, and target one")
        kept = {key: row[key] for key in ("numbers", "target", "solving_moves") if key in row}
        return Document(
            id=str(row.get("id", row["number"] - 1)),
            question=f"P {' '.join(map(str, numbers))} T {target}",
            gold=(str(row["answer"]),),
            details=kept,
        )

    def messages(self, document: Document) -> Messages:
        """The words that a search begins with."""
        return Messages(user=document.question, plain=True)
