"""The file of problems, and the answers that count as right."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest

from dms_train.data_prep.exam_sheets import problem
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.problems import check_prompts, count_correct, read_problems
from dms_train.evaluation.tasks.base import Document
from tests.unit.evaluation.conftest import architecture


def sheet(prompt: str, *answers: str, **details: str) -> Document:
    return Document(id="0", question=prompt, gold=answers, details=details)


def line(number: int) -> str:
    return f"Divide: c = -30 / -2.\nThe final answer is {number}.\n"


@pytest.mark.parametrize(
    ("text", "answers", "count"),
    [
        (line(15), ("15",), 1),
        (line(15) + line(-3), ("15", "-3"), 2),
        (line(-3) + line(15), ("15", "-3"), 0),  # the order matters
        (line(15), ("15", "-3"), 1),  # one is missing
        (line(15) + line(-3) + line(7), ("15", "-3"), 2),  # one too many
        (line(7) + line(15), ("15",), 0),  # the right answer comes too late
        ("", ("15",), 0),
        ("The final answer is 15", ("15",), 1),  # without its end
        ("The final answer is 15 .\n", ("15",), 1),
        ("The final answer is 1.5.\n", ("1.5",), 1),
        ("The final answer is 155.\n", ("15",), 0),
        ("The final answer is 15\nThe final answer is -3.", ("15", "-3"), 2),
        ("The final answer is .\nThe final answer is 4.", ("15", "4"), 1),
    ],
)
def test_right_answers_are_counted(text, answers, count):
    assert count_correct([sheet("", *answers)], [text]) == [count]


def test_the_solutions_of_exam_sheets_are_right():
    draw = random.Random(0)
    problems = [problem(draw, "held_out") for _ in range(20)]
    text = "".join(f"Solution {n}.{p.solution}" for n, p in enumerate(problems, 1))
    assert count_correct([sheet("", *(str(p.answer) for p in problems))], [text]) == [20]


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_whole_sheets_up_to_the_limit(tmp_path):
    records = [{"prompt": f"p{n}", "answers": ["1", "2"], "stop": "\n\n"} for n in range(3)]
    file = write(tmp_path / "p.jsonl", *records, {"prompt": "last", "answers": ["x"]})
    assert [s.question for s in read_problems(file, 5)] == ["p0", "p1"]
    every = read_problems(file, 400)
    assert every[0] == sheet("p0", "1", "2", stop="\n\n")
    assert every[3] == replace(sheet("last", "x"), id="3")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"prompt": "a", "answers": ["1"]}\n{"prompt"', ":2: not valid JSON"),
        ("[1]", ":1: give an object with named columns, not a list"),
        ("{}", ":1: no column 'prompt'"),
        ('{"prompt": "", "answers": ["1"]}', ':1: "prompt" must be a text'),
        ('{"prompt": "a", "answers": []}', ':1: "answers" must be a list of texts'),
        ('{"prompt": "a", "answers": [15]}', ':1: "answers" must be a list of texts'),
        ('{"prompt": "a", "answers": ["1"], "stop": ""}', '"stop" must be'),
        ("", "no documents"),
    ],
)
def test_damaged_files(tmp_path, content, named):
    file = tmp_path / "p.jsonl"
    file.write_text(content)
    with pytest.raises(EvaluationError, match=re.escape(named)):
        read_problems(file, 400)


def test_a_sheet_above_the_limit_is_refused(tmp_path):
    file = write(tmp_path / "p.jsonl", {"prompt": "a", "answers": ["1", "2"]})
    with pytest.raises(EvaluationError, match="max_problems=1"):
        read_problems(file, 1)
    with pytest.raises(FileNotFoundError):
        read_problems(tmp_path / "absent.jsonl", 1)


def test_prompts_must_fit_the_model(tokenizer, tmp_path):
    sheets = [sheet("So 1 = 1.", "1")]
    check_prompts(sheets, tokenizer, architecture())
    long = [sheet("1" * 1024, "1")]
    with pytest.raises(EvaluationError, match="1024 tokens: the model takes 1024"):
        check_prompts(long, tokenizer, architecture())
    with pytest.raises(EvaluationError, match=r"need a tokenizer\.json"):
        check_prompts(sheets, tmp_path, architecture())
