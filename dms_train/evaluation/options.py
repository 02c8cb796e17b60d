"""What a validation measures and on what."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

DEVICES = ("auto", "cpu", "cuda")
ANSWER_PATTERN = r"(?m)The final answer is (.*?)\.?\s*$"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateOptions:
    """How an export is judged beside its teacher.

    Attributes:
        samples: Validation sequences for agreement and cost.
        problems: JSON-lines file of prompts and answers; None generates nothing.
        max_problems: Most problems to take from it, whole lines from the first on.
        max_tokens: Most tokens to generate for a line.
        answer_pattern: Regular expression with one group; its matches are the answers in order.
        window_only: Whether the teacher with nothing but its window solves the problems too.
        max_num_seqs: Lines that are solved at the same time.
        device: `auto` takes a GPU when there is one.
    """

    samples: int = 64
    problems: str | None = None
    max_problems: int = 400
    max_tokens: int = 256
    answer_pattern: str = ANSWER_PATTERN
    window_only: bool = True
    max_num_seqs: int = 100
    device: str = "auto"


def check_options(options: ValidateOptions) -> Iterator[str]:
    """One line for every value that cannot be used."""
    for name in ("samples", "max_problems", "max_tokens", "max_num_seqs"):
        value = getattr(options, name)
        if value < 1:
            yield f"{name}={value}: use at least 1"
    if options.device not in DEVICES:
        yield f"device={options.device}: choose one of {', '.join(DEVICES)}"
    pattern = f"answer_pattern={options.answer_pattern}"
    try:
        groups = re.compile(options.answer_pattern).groups
    except re.error as error:
        yield f"{pattern}: not a regular expression ({error})"
        return
    if groups != 1:
        yield f"{pattern}: {groups} groups; use one, for the answer"
