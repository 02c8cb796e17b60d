"""The experiments in `research/` still run: one small evaluation of a task of theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.scorers.base import AnswerChecker
from research.scorers.countdown import CountdownScorer
from research.tasks.countdown import Countdown
from tests.research.lab_model import write_lab_model

ROOT = Path(__file__).resolve().parents[2]


def research(*words: str) -> str:
    command = [sys.executable, "-m", "research", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_task_of_the_experiments_is_made_evaluated_and_scored(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    research("data", "countdown-problems", "--out", str(problems), "--problems", "3")
    write_lab_model(tmp_path / "model", None)
    given = (f"model.path={tmp_path / 'model'}", "task.name=countdown", f"task.path={problems}")
    research("eval", *given, "sweep.lengths=[0.03125]", f"run.dir={tmp_path / 'run'}")
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["points"][0]["documents"] == 3

    (first, *_) = Countdown().documents(TaskOptions(path=str(problems)), lambda messages: 0)
    texts = [f"! ANS {first.gold[0]}", "! ANS 1 + 1"]
    scores = CountdownScorer().scores(first, texts, AnswerChecker())
    assert [score.share for score in scores] == [1.0, 0.0]
