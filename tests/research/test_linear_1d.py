"""Problems in the linear_1d format of DeepMind's mathematics data set."""

from __future__ import annotations

import ast
import operator
import re
from pathlib import Path

from dms_train.evaluation.problems import read_problems
from research.data.command import main
from research.data.linear_1d import linear_1d_problems

QUESTION = re.compile(r"1: Solve (.+) = (.+) for (\w)\.\nSolution 1\.")
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value(node: ast.expr, variable: str, at: int) -> int:
    """Arithmetic of + - * on whole numbers and the variable."""
    if isinstance(node, ast.BinOp):
        apply = OPERATIONS[type(node.op)]
        return int(apply(value(node.left, variable, at), value(node.right, variable, at)))
    if isinstance(node, ast.UnaryOp):
        return -value(node.operand, variable, at)
    if isinstance(node, ast.Name):
        assert node.id == variable
        return at
    assert isinstance(node, ast.Constant)
    return int(node.value)  # type: ignore[arg-type]


def side(text: str, variable: str, at: int) -> int:
    return value(ast.parse(text, mode="eval").body, variable, at)


def test_linear_1d_problems_have_their_answer_and_no_other() -> None:
    sheets = linear_1d_problems(500, 1, seed=3)
    assert sheets == linear_1d_problems(500, 1, seed=3)
    for prompt, (answer,) in sheets:
        match = QUESTION.fullmatch(prompt)
        assert match, prompt
        left, right, variable = match.groups()
        assert side(left, variable, answer) == side(right, variable, answer)
        assert side(left, variable, answer + 1) != side(right, variable, answer + 1)
        assert "1*" not in re.sub(r"\d1\*", "", prompt)  # a coefficient of one is not written


def test_linear_1d_problems_come_in_many_shapes() -> None:
    prompts = [prompt for prompt, _ in linear_1d_problems(300, 1, seed=0)]
    shapes = {re.sub(r"[0-9]+", "N", re.sub(r"\b[a-z]\b", "x", p)) for p in prompts}
    assert len(shapes) > 100


def test_the_command_writes_sheets_of_one_question(tmp_path: Path) -> None:
    path = tmp_path / "linear.jsonl"
    assert main(["linear-1d-problems", "--out", str(path), "--problems", "7", "--seed", "1"]) == 0
    expected = linear_1d_problems(7, 1, seed=1)
    assert [sheet.question for sheet in read_problems(path, 100)] == [
        each.prompt for each in expected
    ]
