"""Tasks and scorers of other distributions are found by their entry points."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dms_train.evaluation import scorers, tasks
from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.registry import Registry
from dms_train.evaluation.scorers import registry as scorer_registry
from dms_train.evaluation.scorers.base import AnswerChecker, Scorer
from dms_train.evaluation.tasks import registry as task_registry
from dms_train.evaluation.tasks.base import Task

MODULE = """
from dms_train.evaluation.scorers.base import Score, Scorer
from dms_train.evaluation.tasks.base import Document, Messages, Task

class Echo(Task):
    name, title, scorer, where = "echo", "Echo", "same", "anywhere"
    def generate(self, options, tokens):
        yield {"text": "abc"}
    def document(self, row, options):
        return Document(id="0", question=row["text"], gold=(row["text"],))
    def messages(self, document):
        return Messages(user=document.question)

class Same(Scorer):
    name = "same"
    def scores(self, document, texts, checker):
        found = [text == document.gold[0] for text in texts]
        return [Score(answers=(t,), correct=(f,), verdict="") for t, f in zip(texts, found)]
"""
ENTRIES = """
[dms_train.tasks]
echo = third_party_tasks:Echo
renamed = third_party_tasks:Echo
absent = third_party_tasks:Missing

[dms_train.scorers]
same = third_party_tasks:Same
"""


def fresh(kind: type, package: ModuleType, group: str) -> Registry[Any]:
    return Registry(kind, package, group, "task.name")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with entry points."""
    (tmp_path / "third_party_tasks.py").write_text(MODULE)
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_a_task_and_its_scorer_are_found_by_their_entry_points() -> None:
    task = fresh(Task, tasks, task_registry.GROUP).get("echo")
    scorer = fresh(Scorer, scorers, scorer_registry.GROUP).get(task.scorer)
    (document,) = task.documents(TaskOptions(), lambda messages: 1)
    scores = scorer.scores(document, ["abc", "abd"], AnswerChecker())
    assert [score.share for score in scores] == [1.0, 0.0]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("renamed", "names third_party_tasks:Echo, which is no Task with this name"),
        ("absent", "does not load"),
        ("other", "choose one of absent, aime24, .*, echo, .*, renamed, "),
    ],
)
def test_an_entry_point_that_cannot_be_used_is_refused_and_hides_no_other(
    name: str, message: str
) -> None:
    found = fresh(Task, tasks, task_registry.GROUP)
    with pytest.raises(EvaluationError, match=f"task.name={name}: .*{message}") as caught:
        found.get(name)
    assert "\n" not in str(caught.value)
    assert found.get("gsm8k").title == "GSM8K"


def test_a_registered_task_replaces_the_one_with_its_name() -> None:
    found = fresh(Task, tasks, task_registry.GROUP)
    names = found.names()

    class Other(type(found.get("gsm8k"))):  # type: ignore[misc]
        name = "gsm8k"

    found.register(Other)
    assert type(found.get("gsm8k")) is Other
    assert found.names() == names
