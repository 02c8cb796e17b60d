"""The table of policies: every registered one, resumed where it stopped, equal to the engine."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks.records import write_page
from dms_train.cli.config_source import ASSETS_DIR
from dms_train.data_prep.exam_sheets import sheet
from dms_train.evaluation.errors import EvaluationError
from dms_train.inference.llm import LLM
from dms_train.inference.policies.registry import policy_kind, policy_names
from research.folders import RESULTS
from research.policies import run as command
from research.policies.cases import Case, cases
from research.policies.exam import ExamTask
from research.policies.stories import StoriesTask, _texts, _walk
from research.policies.table import tables

ROOT = Path(command.__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "methods.md"
RECORD = RESULTS / "cpu" / "policies.jsonl"
TEACHER = ASSETS_DIR / "exam_teacher"
DENSE = Case(method="keep_all", cr=1)


@pytest.fixture
def stories(tmp_path) -> StoriesTask:
    """Two sheets of one problem each, as texts of the embedded teacher."""
    file, draw = tmp_path / "texts.jsonl", random.Random(0)
    rows = [json.dumps({"text": sheet(draw, 1, "train")}) + "\n" for _ in range(2)]
    file.write_text("".join(rows) + '{"text": "Solve"}\n')
    return StoriesTask(model=TEACHER, file=file, stories=2, prompt=40, tokens=64)


def test_every_policy_without_training_is_measured_at_every_ratio():
    untrained = {n for n in policy_names() if n != "auto" and not policy_kind(n).trained}
    planned = {(case.method, case.cr) for case in cases([2.0, 4.0], [])}
    others = untrained - {"keep_all", "triattention"}  # the latter needs a file of the model
    assert planned == {("keep_all", 1)} | {(n, cr) for n in others for cr in (2.0, 4.0)}
    with pytest.raises(EvaluationError, match="a dense model; give exports"):
        cases([2.0], [TEACHER])


def test_some_methods_are_measured_beside_the_dense_model(tmp_path, capsys):
    words = ["--sheets", "1", "--cr", "4", "--methods", "window", "tova"]
    assert command.main([*words, "--results", str(tmp_path / "rows.jsonl")]) == 0
    rows = [json.loads(row) for row in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["method"] for row in rows} == {"keep_all", "window", "tova"}
    assert "Stories" not in capsys.readouterr().out


def test_a_run_continues_behind_the_rows_that_it_has(tmp_path):
    file = tmp_path / "results" / "rows.jsonl"
    task = ExamTask(model=TEACHER, sheets=1, problems=1, max_tokens=110)
    plan = [(task, case) for case in (DENSE, Case(method="h2o", cr=4.0))]
    first = command.measure(plan[:1], file)
    assert first[0]["result"]["quality"] == [1.0, 1.0, 1.0]  # the teacher solves its sheets
    rows = command.measure(plan, file)
    assert rows[0] == first[0]  # its time too: it was not measured again
    assert rows[1]["result"]["reads"] < rows[0]["result"]["reads"]
    written = file.read_text()
    assert command.measure(plan, file) == rows
    assert file.read_text() == written
    file.write_text(written + '{"task": "ex')
    with pytest.raises(EvaluationError, match="a damaged line"):
        command.measure(plan, file)
    (line, _) = tables(rows)["exam"].splitlines()[-2:]
    assert line.startswith("| `keep_all` | 1 | 1.000 [1.000, 1.000] |")
    assert line.endswith("| 1.0 |")


def test_given_tokens_have_the_distributions_of_the_engine(stories):
    """The window evicts alike inside prompts and behind them, so that the engine has them too."""
    narrow = Case(method="window", cr=4.0)  # 15 tokens before a query
    texts = _texts(stories)
    for case in (DENSE, narrow):
        found = _walk(stories, case)
        llm = LLM(TEACHER, dtype="float32", **case.engine(stories.tokens))
        for row, text in enumerate(texts.tolist()):
            expected = llm.logits(text)[stories.prompt - 1 :]
            torch.testing.assert_close(found.logits[row], expected, atol=1e-4, rtol=1e-4)
    assert (found.reads, found.peak_tokens) == (16, 16)
    dense = stories.measure(DENSE)
    assert dense["quality"] == [0, 0, 0]
    assert dense["reads"] == sum(range(41, 65)) / 24
    assert dense["peak_tokens"] == 64
    assert stories.measure(narrow)["quality"][0] > 0.01


def test_too_few_stories_are_refused(stories):
    with pytest.raises(EvaluationError, match="2 stories of 64 tokens; lower"):
        _texts(StoriesTask(model=TEACHER, file=stories.file, stories=3, prompt=40, tokens=64))


def test_the_page_shows_the_recorded_rows(tmp_path):
    found = tables([json.loads(line) for line in RECORD.read_text().splitlines()])
    copy = tmp_path / "methods.md"
    copy.write_text(PAGE.read_text())
    for task, text in found.items():
        write_page(copy, text, task)
    assert copy.read_text() == PAGE.read_text()
