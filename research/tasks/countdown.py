"""Countdown: reach a target with all numbers, by a search that the model writes out.

For models that were trained on the searches of `python -m research data countdown`
(`research/data/countdown.py`). `countdown-problems` makes the file, of instances that no training
document holds.
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
from research.tasks.word_problems import FIXTURES


class Countdown(Task):
    """Task that is solved if any chain ends in moves that are verified."""

    name = "countdown"
    title = "Countdown"
    scorer = "countdown"
    where = "python -m research data countdown-problems --out FILE --problems 400 makes one"
    fixtures = FIXTURES
    aggregate = Aggregate.ANY
    sampling = TaskSampling(temperature=0.6, top_p=1.0)

    def document(self, row: Row, options: TaskOptions) -> Document:
        """Read the columns `numbers`, `target`, `answer` and, if present, `solving_moves`."""
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
        """Return the first words of a search."""
        return Messages(user=document.question, plain=True)
