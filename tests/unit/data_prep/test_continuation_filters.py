"""Filters of `dms-data generate`, compared with outcomes by hand."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dms_train.data_prep.continuation_filters import Continued, filter_continuations
from dms_train.data_prep.overlap import EvaluationSets
from dms_train.data_prep.prompts import Prompt, PromptEncoder, PromptOptions
from dms_train.data_prep.rows import Row
from dms_train.data_prep.samples import Outcome
from dms_train.inference.outputs import CompletionOutput


def output(text: str, end: str = "stop") -> CompletionOutput:
    return CompletionOutput(
        index=0,
        text=text,
        token_ids=[1],
        finish_reason=end,
        logprobs=None,
        kv=cast(Any, None),
        seconds=0.0,
    )


def prompt(number: int, answer: str = "") -> Prompt:
    return Prompt(number, 0, "", [5], answer=answer)


def outcomes(items: list[Continued]) -> list[list[str]]:
    return [[one.outcome.value for one in item.continuations] for item in items]


CASES = [
    (prompt(0, "72"), [output("So \\boxed{72}."), output("\\boxed{71}"), output("I give up.")]),
    (prompt(1, "1500"), [output("\\boxed{1,500}"), output("\\boxed{1500}", "length")]),
    (prompt(2), [output("A poem."), output("A poem that", "length"), output("", "memory")]),
    (Prompt(3, 0, "", [], rejected=Outcome.TOO_LONG), []),
]


@pytest.mark.parametrize(
    ("only_finished", "verify", "expected"),
    [
        (False, False, [["kept"] * 3, ["kept"] * 2, ["kept", "kept", "out_of_memory"], []]),
        (
            *(True, False),
            [["kept"] * 3, ["kept", "unfinished"], ["kept", "unfinished", "out_of_memory"], []],
        ),
        (
            *(False, True),
            [["kept", "wrong", "no_answer"], ["kept"] * 2, ["kept", "kept", "out_of_memory"], []],
        ),
        (
            *(True, True),
            [
                ["kept", "wrong", "no_answer"],
                ["kept", "unfinished"],
                ["kept", "unfinished", "out_of_memory"],
                [],
            ],
        ),
    ],
)
def test_each_continuation_has_the_outcome_of_the_first_filter_that_rejects_it(
    only_finished: bool, verify: bool, expected: list[list[str]]
) -> None:
    items = list(filter_continuations(CASES, only_finished=only_finished, verify=verify))
    assert [item.prompt for item in items] == [one for one, _ in CASES]
    assert outcomes(items) == expected
    assert [item.outcome.value for item in items] == ["kept"] * 3 + ["too_long"]


def test_the_outcome_of_a_row_is_the_latest_one_of_its_continuations() -> None:
    case = (prompt(0, "3"), [output("Hm."), output("\\boxed{4}"), output("\\boxed{3}", "length")])
    (item,) = filter_continuations([case], only_finished=True, verify=True)
    assert outcomes([item]) == [["no_answer", "wrong", "unfinished"]]
    assert item.outcome is Outcome.WRONG
    assert item.kept == []


@pytest.mark.parametrize(
    ("stored", "answer"),
    [("a=<<1+2=3>>3\n#### 3", "3"), ("#### 1,500", "1500"), ("x^2", "x^2"), (7, "7"), (None, "")],
)
def test_the_answer_of_a_row_follows_the_mark_of_gsm8k(r1: str, stored: Any, answer: str) -> None:
    options = PromptOptions(tokenizer=r1, column="question", answer_column="answer")
    encoder = PromptEncoder(options, EvaluationSets(()), 100)
    row = Row(0, 0, "here", {"question": "Why?", "answer": stored})
    assert encoder.encode(row).answer == answer
