"""Rows in the schema of OpenR1-Math-220k: a problem, its answer and up to four traces of R1.

A row may have fewer flags than traces, or none. Its flags then apply to no trace.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from dms_train.data.errors import DataError
from dms_train.data_prep.rows import Row
from dms_train.data_prep.samples import Outcome, Sample, Trace
from dms_train.evaluation.answers import Attempt

_FLAG, _COMPLETE = "correctness_math_verify", "is_reasoning_complete"
COLUMNS = ("problem", "answer", "generations", _FLAG, _COMPLETE)
KEY = "uuid"


class Filter(StrEnum):
    """Rule that decides which traces are correct.

    Attributes:
        FLAG: Traces that the data set's own run of math-verify flagged.
        REVERIFY: Traces whose answer equals the row's by the strict extraction used here.
        STRICT: Traces that pass both, and whose reasoning is flagged as complete.
    """

    FLAG = "flag"
    REVERIFY = "reverify"
    STRICT = "strict"


def sample_of(row: Row, rule: Filter) -> Sample:
    """Return the sample of a row; traces that the flags reject are marked as rejected.

    Raises:
        DataError: A column is missing or holds another type.
    """
    values = row.values
    missing = [name for name in COLUMNS if name not in values]
    if missing:
        raise DataError(
            f"{row.where}: no column {', '.join(missing)}; the columns of OpenR1-Math-220k are "
            f"needed: {', '.join(COLUMNS)}"
        )
    problem, answer, generations = (values[name] for name in COLUMNS[:3])
    sample = Sample(row.number, row.source, row.where, str(values.get(KEY) or ""), problem or "")
    _check_types(row.where, values)
    if not problem or not answer or not generations or None in generations:
        sample.rejected = Outcome.MISSING_VALUE
        return sample
    flags, complete = _flags(values[_FLAG], generations), _flags(values[_COMPLETE], generations)
    for number, text in enumerate(generations):
        outcome = _by_flags(rule, flags[number], complete[number])
        sample.traces.append(_trace(problem, answer, text, rule, outcome))
    return sample


def _trace(problem: str, answer: str, text: str, rule: Filter, outcome: Outcome) -> Trace:
    messages = [{"role": "user", "content": problem}, {"role": "assistant", "content": text}]
    attempt = None
    if rule is not Filter.FLAG and outcome is Outcome.OPEN:
        # as in open-r1; only `strict` requires completeness
        attempt = Attempt(answer, text, allow_unfinished=True)
    return Trace(messages, attempt, outcome)


def _by_flags(rule: Filter, flag: bool | None, complete: bool | None) -> Outcome:
    """Return the outcome that a trace's flags give; None means that the flag is unknown."""
    if rule is Filter.REVERIFY:
        return Outcome.OPEN
    if flag is None or (rule is Filter.STRICT and complete is None):
        return Outcome.FLAG_MISMATCH
    if not flag:
        return Outcome.FLAG_FALSE
    return Outcome.INCOMPLETE if rule is Filter.STRICT and not complete else Outcome.OPEN


def _flags(flags: list[bool | None] | None, generations: list[str]) -> list[bool | None]:
    """Return one flag for every trace; None for all traces if the lengths differ."""
    return flags if flags and len(flags) == len(generations) else [None] * len(generations)


def _check_types(where: str, values: dict[str, Any]) -> None:
    for name in COLUMNS[:2]:
        if not isinstance(values[name], str | None):
            raise DataError(f"{where}: {name} is {type(values[name]).__name__}, expected text")
    for name, kind in ((COLUMNS[2], str), (_FLAG, bool), (_COMPLETE, bool)):
        value = values[name]
        if not isinstance(value, list | None) or not all(
            isinstance(one, kind | None) for one in value or ()
        ):
            raise DataError(f"{where}: {name} is not a list of {kind.__name__} values")
