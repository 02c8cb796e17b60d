"""The exam script reports what the embedded teacher solves, which is nearly everything."""

from __future__ import annotations

import re

from dms_train.cli.config_source import ASSETS_DIR
from dms_train.data_prep.prepare import main as dms_data
from research import exam


def test_the_embedded_teacher_solves_unseen_problems(tmp_path, capsys) -> None:
    problems = tmp_path / "p.jsonl"
    assert dms_data(["exam-problems", "--out", str(problems), "--sheets", "10", "--seed", "9"]) == 0
    capsys.readouterr()
    assert exam.main([str(ASSETS_DIR / "exam_teacher"), str(problems)]) == 0
    shown = re.fullmatch(r".*: (\S+) \[.*\] of 20 problems\n", capsys.readouterr().out)
    assert shown
    assert float(shown[1]) >= 0.95


def test_a_missing_file_is_one_line(tmp_path, capsys) -> None:
    teacher = str(ASSETS_DIR / "exam_teacher")
    assert exam.main([teacher, str(tmp_path / "none.jsonl")]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "none.jsonl" in error
