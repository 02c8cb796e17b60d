"""Loading of the harness' tasks without reading all of its definitions."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="pip install -c constraints.txt -e '.[eval]'")

from lm_eval.tasks import TaskManager

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.harness.loading import HarnessOptions, _manager
from tests.support.harness_tasks import CHOOSE, CONTINUE, ROLL, write_tasks


@pytest.fixture(scope="module")
def whole() -> Any:
    return TaskManager()


def defined(manager: Any, name: str) -> dict[str, str]:
    """File of a name and of all tasks that the harness evaluates for it."""
    entry = manager.task_index[name]
    files = {name: str(entry.yaml_path)}
    listed = list(entry.tags) if entry.cfg is None else entry.cfg.get("task", [])
    for child in [] if isinstance(listed, str) else listed:
        files |= defined(manager, child if isinstance(child, str) else child["task"])
    return files


@pytest.mark.slow  # reads all definitions of the harness
@pytest.mark.parametrize(
    ("name", "count"),
    [("mmlu", 66), ("ai2_arc", 3), ("lambada_openai", 1), ("afrixnli", 1), ("leaderboard", 40)],
)
def test_a_task_has_the_definitions_of_the_whole_index(whole, name, count):
    manager = _manager(HarnessOptions(tasks=(name,)), {name})
    files = defined(manager, name)
    assert files == defined(whole, name)
    assert len(files) >= count
    assert len(manager.all_tasks) < 0.1 * len(whole.all_tasks)


def test_only_groups_of_own_tasks_need_no_definitions_of_the_harness(tmp_path):
    folder = write_tasks(tmp_path / "tasks")
    for name, member in (("own", CONTINUE), ("mixed", "lambada_openai")):
        (folder / f"{name}.yaml").write_text(f"group: {name}\ntask: [{CHOOSE}, {member}]\n")
    options = HarnessOptions(tasks=("own",), include_path=folder)
    assert set(_manager(options, {"own"}).all_tasks) == {"own", "mixed", CHOOSE, CONTINUE, ROLL}
    assert "lambada_openai" in _manager(options, {"mixed"}).all_tasks


def test_a_prompt_ends_in_a_known_place() -> None:
    with pytest.raises(EvaluationError, match="--prompt-end answer: question or examples"):
        HarnessOptions(tasks=("own",), prompt_end="answer")
