"""A stage `run_tasks` that cannot be run is refused before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dms_train.app.start_point import StartPoint
from dms_train.app.task_evaluation import check_tasks
from dms_train.config.build import ConfigError
from dms_train.config.frozen import read_frozen, require_same
from dms_train.config.schema import RunConfig
from dms_train.evaluation.errors import EvaluationError
from dms_train.training.state import TrainState
from tests.support import configs

TEACHER = Path(configs.__file__).parents[2] / "dms_train" / "assets" / "exam_teacher"


def config(path: Path | None, *tasks: str, **changes: Any) -> RunConfig:
    block = {"tasks": tasks, "task": {"path": path and str(path)}, "model": {"device": "cpu"}}
    block["sweep"] = {"lengths": [0.25]}
    return configs.config(
        stage__run=["zero_neuron", "export", "run_tasks"], stage__run_tasks={**block, **changes}
    )


def start(directory: Path | None = TEACHER) -> StartPoint:
    return StartPoint(
        architecture=configs.architecture(),
        model_dir=directory,
        tokenizer_dir=directory,
        state=TrainState(),
    )


@pytest.fixture
def sheets(tmp_path: Path) -> Path:
    path = tmp_path / "sheets.jsonl"
    row = {"prompt": "1: Solve 2*c = 4 for c.\nSolution", "answers": ["2"], "stop": "a"}
    path.write_text(json.dumps(row) + "\n")
    return path


def test_a_stage_that_can_be_run_is_accepted(sheets: Path) -> None:
    check_tasks(config(sheets, "exam_sheets"), start())
    check_tasks(configs.config(stage__run=["export"]), start(None))  # without the stage


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tasks": ["exam_sheet"]}, "stage.run_tasks: .*exam_sheet"),
        ({"sweep": {}}, "stage.run_tasks: task exam_sheets: needs sweep.lengths"),
        ({"tasks": ["livecodebench"]}, "stage.run_tasks: .*runs programs"),
        ({"policy": {"name": "window"}}, "stage.run_tasks: policy.name=window: give"),
        ({"policy": {"window": 4}}, "stage.run_tasks: policy=auto: takes no options, got window"),
    ],
)
def test_values_are_refused(sheets: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(EvaluationError, match=expected):
        check_tasks(config(sheets, **{"tasks": ["exam_sheets"], **changes}), start())


def test_documents_and_a_tokenizer_are_needed(sheets: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.jsonl"):
        check_tasks(config(tmp_path / "absent.jsonl", "exam_sheets"), start())
    sheets.write_text(json.dumps({"prompt": "\u4e00", "answers": ["2"]}) + "\n")
    with pytest.raises(EvaluationError, match=r"stage\.run_tasks: .*tokenizer cannot encode"):
        check_tasks(config(sheets, "exam_sheets"), start())
    with pytest.raises(ConfigError, match=r"set model\.tokenizer"):
        check_tasks(config(sheets, "exam_sheets"), start(None))


def test_a_resumed_run_may_change_the_stage_and_older_runs_have_none(tmp_path: Path) -> None:
    import yaml

    from dms_train.config.build import to_mapping

    file = tmp_path / "config.yaml"
    values = to_mapping(configs.config())
    file.write_text(yaml.safe_dump(values))
    require_same(configs.config(stage__run_tasks={"tasks": ["niah"]}), file)
    del values["stage"]["run_tasks"]
    file.write_text(yaml.safe_dump(values))
    assert read_frozen(file) == configs.config()
