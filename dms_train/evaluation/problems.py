"""Problems with known answers: the file, and what counts as solved."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dms_train.evaluation.answers import same_number_or_text
from dms_train.evaluation.errors import EvaluationError
from dms_train.hf.architecture import Architecture
from dms_train.hf.errors import HFError
from dms_train.hf.row_files import json_lines
from dms_train.inference.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """One line of a problems file: a prompt that asks for one or more answers.

    Attributes:
        prompt: What the model continues.
        answers: Of the problems on the sheet, in the order in which they must be given.
        stop: Text at which the continuation ends; None for the model's own end.
    """

    prompt: str
    answers: tuple[str, ...]
    stop: str | None = None


def read_problems(path: Path, max_problems: int) -> list[Sheet]:
    """The first sheets of a JSON-lines file.

    Args:
        path: One object `{"prompt": text, "answers": [text, ...], "stop": text}` a line.
        max_problems: Sheets are taken while they have no more problems together.

    Raises:
        FileNotFoundError: There is no such file.
        EvaluationError: A line is damaged, or there is nothing to take.
    """
    sheets: list[Sheet] = []
    taken = 0
    for where, values in _rows(path):
        sheet = _sheet(values, where)
        taken += len(sheet.answers)
        if taken > max_problems:
            break
        sheets.append(sheet)
    if not sheets:
        raise EvaluationError(f"{path}: no sheet of at most max_problems={max_problems} problems")
    return sheets


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        yield from json_lines(path)
    except HFError as error:
        raise EvaluationError(str(error)) from None


def _sheet(values: dict[str, Any], where: str) -> Sheet:
    prompt, answers, stop = (values.get(name) for name in ("prompt", "answers", "stop"))
    if not isinstance(prompt, str) or not prompt:
        raise EvaluationError(f'{where}: needs "prompt", a text that is not empty')
    if not isinstance(answers, list) or not answers or not all(_is_text(a) for a in answers):
        raise EvaluationError(f'{where}: needs "answers", a list of texts, such as ["15"]')
    if stop is not None and not _is_text(stop):
        raise EvaluationError(f'{where}: "stop" must be a text that is not empty, or absent')
    return Sheet(prompt=prompt, answers=tuple(answers), stop=stop)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def check_prompts(sheets: list[Sheet], directory: Path, architecture: Architecture) -> None:
    """Refuse prompts that the model in `directory` cannot be given.

    Raises:
        EvaluationError: It has no tokenizer, or a prompt is too long for it.
    """
    tokenizer = Tokenizer.load(directory)
    if tokenizer is None:
        raise EvaluationError(f"{directory}: problems need a tokenizer.json beside the model")
    longest = max(len(tokenizer.encode(sheet.prompt)) for sheet in sheets)
    if longest >= architecture.max_position_embeddings:
        raise EvaluationError(
            f"a prompt of {longest} tokens: the model takes "
            f"{architecture.max_position_embeddings}; shorten the problems"
        )


def solved(text: str, answers: tuple[str, ...], pattern: re.Pattern[str]) -> int:
    """How many answers a continuation gives: its k-th match must be the k-th answer.

    Matches beyond the last answer do not count, neither for nor against.
    """
    given = [match.group(1).strip() for match in pattern.finditer(text)]
    return sum(same_number_or_text(g, a) for g, a in zip(given, answers, strict=False))
