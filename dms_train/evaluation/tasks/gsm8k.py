"""GSM8K: grade-school problems with whole numbers as answers, zero-shot with Meta's prompt."""

from __future__ import annotations

from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.tasks.base import Document, Messages, Row, Task, TaskSampling
from dms_train.evaluation.tasks.data_files import DataSource

_ANSWER_MARK = "####"


def meta_prompt(problem: str) -> Messages:
    """Return the zero-shot prompt that Meta publishes for Llama 3 (paper, appendix F)."""
    return Messages(
        user="Given the following problem, reason and give a final answer to the problem.\n"
        f"Problem: {problem}\n"
        'Your response should end with "The final answer is [answer]" where [answer] is the '
        "response to the problem."
    )


class Gsm8k(Task):
    """The test set."""

    name = "gsm8k"
    title = "GSM8K"
    scorer = "stated"
    sampling = TaskSampling(temperature=0.0, top_p=1.0, max_tokens=1024)
    where = "the file is main/test-00000-of-00001.parquet of openai/gsm8k"
    source = DataSource(
        repo="openai/gsm8k",
        file="main/test-00000-of-00001.parquet",
        rows=1319,
    )

    def document(self, row: Row, options: TaskOptions) -> Document:
        """Read columns `question` (or `problem`) and `answer`, which may be a whole solution."""
        question = row["question"] if "question" in row else row["problem"]
        answer = str(row["answer"]).rpartition(_ANSWER_MARK)[2].replace(",", "").strip()
        if not answer.lstrip("-").replace(".", "", 1).isdecimal():
            raise ValueError(f"answer {answer!r}: not a number")
        name = row.get("source", row["number"] - 1)
        return Document(id=str(name), question=question, gold=(answer,))

    def messages(self, document: Document) -> Messages:
        """Return Meta's prompt."""
        return meta_prompt(document.question)
