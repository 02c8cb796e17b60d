"""Verdicts on 100 answers that were judged by hand; `-s` prints those of math-verify beside them.

`answer_table.jsonl` holds the gold answer, a text, and whether its answer is right. It follows what
graders of MATH and GSM8K accept: a unit or a percent sign may be left out but not be another one,
the last box counts, and a rounded number does not equal an exact one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dms_train.evaluation.answer_text import last_box, plain_latex, split_unit
from dms_train.evaluation.answers import Attempt, Verdict, verify_answer

TABLE = Path(__file__).with_name("answer_table.jsonl")
ROWS = [json.loads(line) for line in TABLE.read_text("utf-8").split("\n") if line]


def _by_math_verify(gold: str, text: str) -> bool:
    import math_verify

    found = math_verify.parse(text, raise_on_error=False)
    return bool(math_verify.verify(math_verify.parse(f"${gold}$"), found))


def test_all_100_verdicts_are_those_given_by_hand() -> None:
    assert len(ROWS) == 100
    wrong, alone = [], 0
    for row in ROWS:
        verdict = verify_answer(Attempt(row["gold"], row["text"]))
        if (verdict is Verdict.CORRECT) is not row["correct"]:
            wrong.append((row, verdict))
        theirs = _by_math_verify(row["gold"], row["text"])
        alone += theirs is row["correct"]
        right = "right" if row["correct"] else "not right"
        print(f"{right:9}  math-verify {theirs!s:5}  {row['gold']}  |  {row['text']}")
    print(f"right verdicts of 100: {100 - len(wrong)} here, {alone} by math-verify alone")
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{3}, wait, \\boxed{5}", "5"),
        ("\\boxed{3} and $\\boxed{5}$", "3, 5"),
        ("$x=\\boxed{1}$ or $x=\\boxed{2}$", "1, 2"),
        ("\\boxed{5}\n\n\\boxed{5}", "5"),
        ("\\boxed 7$", "7"),
        ("\\boxed 72.", "72"),
        ("\\fbox{$7$}", "$7$"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\boxed{7}}", "7"),
        ("\\boxed{5}, so \\boxed{6", ""),
        ("\\boxed{5}{6}", ""),
        ("\\boxed", ""),
        ("\\boxedsize 5", None),
    ],
)
def test_the_last_box_is_found(text: str, content: str | None) -> None:
    assert last_box(text) == content


@pytest.mark.parametrize(
    ("answer", "value", "unit"),
    [
        ("3 m", "3", "m"),
        ("3m", "3m", ""),
        ("3 x", "3 x", ""),
        ("2 pi", "2 pi", ""),
        ("2\\pi\\text{ cm}", "2\\pi", "cm"),
        ("60 miles per hour", "60", "mph"),
        ("60\\,\\mathrm{km}/\\mathrm{h}", "60", "km/h"),
        ("6\\text{ sq. cm}", "6", "cm^2"),
        ("12\\text{ apples}", "12", ""),
        ("-\\$5", "-5", "$"),
        ("25^\\circ\\text{C}", "25", ""),
        ("\\text{east}", "\\text{east}", ""),
        ("2\\mathrm{i}", "2\\mathrm{i}", ""),
    ],
)
def test_units_are_taken_off_and_have_one_name(answer: str, value: str, unit: str) -> None:
    assert split_unit(answer) == (value, unit)


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("1\\,234\\,567", "1234567"),
        ("1 2", "1 2"),
        ("1 000/3", "1 000/3"),
        ("1.2\\overline{34}", "\\frac{611}{495}"),
        ("1{,}000.5", "1000.5"),
        ("\uff13½", "3\\frac{1}{2}"),
        ("x²", "x^{2}"),
        ("$ .5 $.", "0.5"),
    ],
)
def test_notation_is_rewritten(answer: str, plain: str) -> None:
    assert plain_latex(answer) == plain
