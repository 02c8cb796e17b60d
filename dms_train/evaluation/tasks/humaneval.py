"""HumanEval: functions written from their docstring, judged by the tests of the benchmark.

Prompt, stop texts and length are those of `humaneval_instruct` of lm-evaluation-harness: the answer
begins with the signature and the docstring, and the model writes the body. One chain at temperature
0 gives pass@1; with W sampled chains, `accuracy` is pass@all, `chain_accuracy` is pass@1 and
`pass_at_w` the unbiased estimate.
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
from dms_train.evaluation.tasks.data_files import DataSource

_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")


class HumanEval(Task):
    """The 164 functions of Chen et al. (2021)."""

    name = "humaneval"
    title = "HumanEval"
    scorer = "completion"
    aggregate = Aggregate.ANY
    sampling = TaskSampling(temperature=0.0, top_p=1.0, max_tokens=1024)
    where = (
        "the file is openai_humaneval/test-00000-of-00001.parquet of openai/openai_humaneval; it "
        "runs programs of the model and needs --allow-code"
    )
    source = DataSource(
        repo="openai/openai_humaneval",
        file="openai_humaneval/test-00000-of-00001.parquet",
        rows=164,
    )

    def document(self, row: Row, options: TaskOptions) -> Document:
        """Read columns `task_id`, `prompt`, `test` and `entry_point`."""
        return Document(
            id=str(row["task_id"]),
            question=row["prompt"],
            gold=("all tests pass",),
            details={"test": row["test"], "entry_point": row["entry_point"]},
        )

    def messages(self, document: Document) -> Messages:
        """Return a prompt that ends where the body of the function begins."""
        return Messages(
            user="Write a solution to the following problem and make sure that it passes the "
            f"tests:\n```python\n{document.question}\n```\n",
            answer_prefix=f"Here is the completed function:\n```python\n{document.question}\n",
        )

    def stop(self, document: Document) -> tuple[str, ...]:
        """Return texts that follow a function, and the end of the block of code."""
        return _STOPS
