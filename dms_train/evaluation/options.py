"""What a validation measures and on what."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from dms_train.limits import AtLeast, OneOf

DEVICES = ("auto", "cpu", "cuda")
ANSWER_PATTERN = r"(?m)The final answer is (.*?)\.?\s*$"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateOptions:
    """How an export is compared with its teacher.

    Attributes:
        samples: Validation sequences for agreement and cost.
        problems: JSON-lines file of prompts and answers; None generates nothing.
        max_problems: Most problems to take from it, whole lines from the first on.
        max_tokens: Most tokens to generate for a line.
        answer_pattern: Regular expression with one group; its matches are the answers in order.
        window_only: Whether the teacher with only its window is measured too, as a control.
        max_num_seqs: Lines that are solved at the same time.
        device: `auto` takes a GPU when there is one.
    """

    samples: Annotated[int, AtLeast(1)] = 64
    problems: str | None = None
    max_problems: Annotated[int, AtLeast(1)] = 400
    max_tokens: Annotated[int, AtLeast(1)] = 256
    answer_pattern: str = ANSWER_PATTERN
    window_only: bool = True
    max_num_seqs: Annotated[int, AtLeast(1)] = 100
    device: Annotated[str, OneOf(*DEVICES)] = "auto"

    def check(self, path: str) -> Iterator[str]:
        """One line for an answer pattern that cannot be used."""
        where = f"{path}.answer_pattern" if path else "answer_pattern"
        try:
            groups = re.compile(self.answer_pattern).groups
        except re.error as error:
            yield f"{where}={self.answer_pattern}: not a regular expression ({error})"
            return
        if groups != 1:
            yield f"{where}={self.answer_pattern}: {groups} groups; use one, for the answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """Which documents are evaluated.

    Attributes:
        name: Of a task in `evaluation.tasks`.
        path: File of its documents; None generates them, where the task can.
        hub: Take the file of the task's data set from the local cache of the hub.
        download: Fetch it from the hub where it is absent.
        sha256: What the file must hash to; None accepts any.
        subset: Accept another number of documents than were published.
        fixture: Take the five documents that ship with the package.
        limit: Most documents, from the first on; None takes all.
        seed: Of generated documents and of the order of choices.
        count: Documents to generate.
        context_length: Most tokens of a generated prompt and its answer.
        haystack: Text file that surrounds a needle.
    """

    name: str = "exam_sheets"
    path: str | None = None
    hub: bool = False
    download: bool = False
    sha256: str | None = None
    subset: bool = False
    fixture: bool = False
    limit: Annotated[int | None, AtLeast(1)] = None
    seed: int = 42
    count: Annotated[int, AtLeast(1)] = 500
    context_length: Annotated[int, AtLeast(1)] = 4096
    haystack: str | None = None
