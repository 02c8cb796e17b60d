"""Documents of one length, problems with answers, and the linear_1d format."""

from __future__ import annotations

import ast
import json
import operator
import random
import re
from pathlib import Path

import pytest

from dms_train.data.manifest import read_manifest
from dms_train.data_prep.exam_sheets import document
from dms_train.data_prep.linear_1d import linear_1d_problems
from dms_train.data_prep.prepare import main
from dms_train.evaluation.problems import read_problems

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


@pytest.mark.parametrize("length", [1, 100, 320, 1000])
def test_documents_start_with_a_sheet_and_have_one_length(length: int) -> None:
    text = document(random.Random(0), length, (1, 2), "<eod>")
    assert len(text.replace("<eod>", "E")) == length
    assert text.startswith("1: Solve"[:length])
    for following in text.split("<eod>")[1:]:
        assert following.startswith("1: Solve"[: len(following)])


def test_documents_become_samples_that_start_with_a_sheet(tmp_path: Path) -> None:
    command = ["exam-sheets", "--out", str(tmp_path), "--sheets", "12", "--document-tokens", "320"]
    assert main(command) == 0
    manifest = read_manifest(str(tmp_path / "train"))
    assert (manifest.documents, manifest.tokens) == (12, 12 * 320)


def test_problems_are_what_validation_reads(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    command = ["exam-problems", "--out", str(path), "--sheets", "7", "--n", "3"]
    assert main(command) == 0
    sheets = read_problems(path, 100)
    assert len(sheets) == 7
    assert all(len(sheet.answers) == 3 and sheet.stop == "\n\n" for sheet in sheets)
    assert json.loads(path.read_text().splitlines()[0])["prompt"].endswith("Solution 1.")
    assert main(command) == 2  # exists already
    assert main([*command, "--overwrite"]) == 0
