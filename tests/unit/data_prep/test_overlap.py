"""Every public benchmark of this package can be kept out of the training data."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from dms_train.data_prep.overlap import EvaluationSets
from dms_train.evaluation.options import TaskOptions
from dms_train.evaluation.tasks.base import FIXTURES
from dms_train.evaluation.tasks.data_files import read_rows
from dms_train.evaluation.tasks.registry import all_tasks

PUBLIC = [name for name, found in all_tasks().items() if found.source or found.published]


def questions(name: str) -> list[str]:
    """As the task itself reads them."""
    documents = all_tasks()[name].documents(TaskOptions(fixture=True), lambda _: 0)
    return [document.question for document in documents]


def test_the_public_benchmarks_are_these() -> None:
    assert [
        *("aime24", "aime25", "gpqa_diamond", "gsm8k", "humaneval", "livecodebench", "math500"),
    ] == PUBLIC


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
@pytest.mark.parametrize("name", PUBLIC)
def test_every_question_of_a_public_benchmark_is_found(
    tmp_path: Path, name: str, suffix: str
) -> None:
    path = FIXTURES / f"{name}.jsonl"
    if suffix == ".csv":
        rows = list(read_rows(path))
        path = tmp_path / f"{name}.csv"
        with path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    sets = EvaluationSets([path])
    asked = questions(name)
    assert len(asked) == 5
    for question in asked:
        found = sets.find(f" {question.upper()}\n")
        assert found is not None
        assert found.label == f"{path.name}, exact"
