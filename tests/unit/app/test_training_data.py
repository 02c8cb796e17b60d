"""The record of a run's text: shares by hand, and what is kept of earlier runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dms_train.app.start_point import StartPoint
from dms_train.app.training_data import describe, origins
from dms_train.data.manifest import Source, file_sha256
from dms_train.data.options import DataOptions
from dms_train.data.origins import Terms
from dms_train.data.writer import ShardWriter
from dms_train.data_prep.prepare import main
from dms_train.mcore.checkpoints import state
from dms_train.training.state import TrainState
from tests.support import configs

START = StartPoint(
    architecture=configs.architecture(), model_dir=None, tokenizer_dir=None, state=TrainState()
)
EARLIER = [[{"source": "old", "license": "CC0", "model": None, "sha256": "c", "share": 1.0}]]


def shard(prefix: Path, tokens: int, terms: Terms) -> str:
    with ShardWriter(prefix, vocab_size=50, eod_id=None, tokenizer_sha256="a" * 64) as writer:
        for _ in range(tokens // 10):
            writer.add(np.full(10, 3, dtype=np.int32))
        writer.finish((Source(name="words", sha256="b" * 64, rows=tokens // 10),), origins=terms)
    return str(prefix)


@pytest.fixture
def paths(tmp_path: Path) -> tuple[str, str]:
    """A shard of 100 tokens, and a blend of 120 and 180 tokens."""
    for name, tokens in (("a", 100), ("b", 120), ("c", 180)):
        terms = Terms(source=name, license="MIT", model=None if name == "a" else "tiny")
        shard(tmp_path / name, tokens, terms)
    blend = str(tmp_path / "blend")
    assert main(["mix", str(tmp_path / "b"), str(tmp_path / "c"), "--output", blend]) == 0
    return str(tmp_path / "a"), blend


def options(paths: tuple[str, str], weights: tuple[float, ...] | None = None) -> DataOptions:
    return replace(configs.config().data, paths=paths, weights=weights)


@pytest.mark.parametrize(
    ("weights", "shares"), [(None, [0.25, 0.3, 0.45]), ((3.0, 1.0), [0.75, 0.1, 0.15])]
)
def test_shares_follow_the_weights_of_the_run(
    paths: tuple[str, str], tmp_path: Path, weights: tuple[float, ...] | None, shares: list[float]
) -> None:
    found = origins(options(paths, weights))
    assert [one["share"] for one in found] == pytest.approx(shares)
    assert [one["source"] for one in found] == ["a", "b", "c"]
    assert [one["model"] for one in found] == [None, "tiny", "tiny"]
    assert [one["sha256"] for one in found] == [
        file_sha256(tmp_path / f"{name}.bin") for name in "abc"
    ]


def write_student(folder: Path, kind: str, record: dict[str, Any]) -> Path:
    if kind == "checkpoint":
        state.seal(folder, record, {})
    else:
        stored = {"export_format": "dms", "provenance": record}
        (folder / "export.json").write_text(json.dumps(stored), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_a_loaded_student_keeps_the_text_of_its_own_runs(
    paths: tuple[str, str], tmp_path: Path, kind: str
) -> None:
    (tmp_path / "student").mkdir()
    student = write_student(tmp_path / "student", kind, {"training_data": EARLIER})
    now = origins(options(paths))
    assert describe(options(paths), START) == [now]
    assert describe(options(paths), replace(START, student=student)) == [*EARLIER, now]
    write_student(student, kind, {})
    assert describe(options(paths), replace(START, student=student)) == [now]


def test_a_resumed_run_keeps_its_record(paths: tuple[str, str], tmp_path: Path) -> None:
    write_student(tmp_path, "checkpoint", {"training_data": EARLIER})
    resumed = replace(START, student=tmp_path, resumes=True)
    assert describe(options(paths), resumed) == EARLIER
