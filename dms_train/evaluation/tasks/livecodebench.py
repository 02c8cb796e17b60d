"""LiveCodeBench: programming problems of 2024-08-01 to 2025-01-31 (paper, appendix F.2).

The window lies in release_v5. Hidden tests are stored there as compressed pickles; they are read as
text only, so that a file cannot run code.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from typing import Any

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.programs import ProgramTest
from dms_train.evaluation.tasks.base import Aggregate, Document, Messages, Row, Task

_FIRST, _LAST = "2024-08-01", "2025-01-31"
_SYSTEM = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves "
    "it. The assistant first thinks about the reasoning process in the mind and then provides the "
    "user with the answer. The reasoning process and answer are enclosed within <think> </think> "
    "and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> "
    "<answer> answer here </answer>."
)
_ASK = (
    "You will be given a question (problem specification) and will generate a correct Python "
    "program that matches the specification and passes all tests.\n\nQuestion: "
)
_WITH_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose your "
    "code within delimiters."
)
_WITHOUT_STARTER = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly "
    "test on the sample inputs). Enclose your code within delimiters as follows. Ensure that when "
    "the python program runs, it reads the inputs, runs the algorithm and writes output to STDOUT."
)


class LiveCodeBench(Task):
    """Problems that a program solves; one passing chain is enough (pass@all)."""

    name = "livecodebench"
    title = "LiveCodeBench"
    scorer = "program"
    aggregate = Aggregate.ANY
    published = 880
    where = (
        "join test.jsonl to test5.jsonl (release_v5) of livecodebench/code_generation_lite in one "
        "file; it runs programs of the model and needs --allow-code"
    )

    def selects(self, row: Row) -> bool:
        """Return whether the contest lies in the window of the paper."""
        return _FIRST <= str(row["contest_date"])[:10] <= _LAST

    def document(self, row: Row, options: TaskOptions) -> Document:
        """Read columns of the release file."""
        return Document(
            id=str(row["question_id"]),
            question=row["question_content"],
            gold=("all tests pass",),
            details={
                "starter": row["starter_code"] or "",
                "function": json.loads(row["metadata"] or "{}").get("func_name"),
                "public": row["public_test_cases"],
                "private": row["private_test_cases"],
            },
        )

    def messages(self, document: Document) -> Messages:
        """Return the prompt for DeepSeek R1."""
        starter = document.details["starter"]
        how = _WITH_STARTER if starter else _WITHOUT_STARTER
        code = starter or "# YOUR CODE HERE"
        return Messages(
            system=_SYSTEM,
            user=f"{_ASK}{document.question}\n\n{how}\n```python\n{code}\n```\n\n",
        )


def program_tests(document: Document) -> list[ProgramTest]:
    """Return shown and hidden tests of a document.

    Raises:
        EvaluationError: The tests are damaged.
    """
    details = document.details
    try:
        rows = [*json.loads(details["public"]), *_hidden(details["private"])]
        return [
            ProgramTest(
                row["input"],
                row["output"],
                details["function"] if row["testtype"] == "functional" else None,
            )
            for row in rows
        ]
    except (ValueError, KeyError, TypeError, zlib.error, pickle.UnpicklingError, EOFError):
        raise EvaluationError(f"livecodebench: the tests of {document.id} are damaged") from None


def _hidden(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        packed = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("neither JSON nor base64") from error
    return json.loads(_TextUnpickler(io.BytesIO(zlib.decompress(packed))).load())


class _TextUnpickler(pickle.Unpickler):
    """Reads plain values; a pickle that names a class or a function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse everything."""
        raise pickle.UnpicklingError(f"{module}.{name}")
