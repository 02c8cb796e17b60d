"""The context of a run, where it is not that of the model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dms_train.app.model import read_architecture
from dms_train.app.start_point import find_start, with_student
from dms_train.cli.config_source import compose
from dms_train.config.build import ConfigError
from dms_train.mcore.options import ALL_WEIGHTS
from dms_train.planning.check import check
from tests.support import refusals


def written(path: Path, **changes: object) -> Path:
    """A dense model directory without a tokenizer."""
    empty = path.parent / "no_tokenizer"
    empty.mkdir(exist_ok=True)
    refusals.write_model(path, empty, **changes)
    return path


def configured(model: Path, *more: str):
    return compose(["stage=pretrain", "data.paths=[none]", f"model.path={model}", *more])


def test_samples_may_be_longer_than_the_positions_of_the_model(tmp_path: Path) -> None:
    model, longer = written(tmp_path / "model"), ("data.seq_length=1000",)
    config = configured(model, *longer)
    stated = find_start(config).architecture
    assert stated.max_position_embeddings == 128
    with pytest.raises(ConfigError, match=r"or set model\.max_position_embeddings"):
        check(config, world_size=1, architecture=stated)
    config = configured(model, *longer, "model.max_position_embeddings=1000")
    set_by_user = find_start(config).architecture
    assert set_by_user == dataclasses.replace(stated, max_position_embeddings=1000)
    assert read_architecture(config.model) == set_by_user
    check(config, world_size=1, architecture=set_by_user)


def test_a_student_may_have_another_context_but_no_other_shape(tmp_path: Path) -> None:
    start = find_start(configured(written(tmp_path / "model")))
    student = written(tmp_path / "student", max_position_embeddings=512)
    assert with_student(start, student, ALL_WEIGHTS).architecture.max_position_embeddings == 128
    other = written(tmp_path / "other", num_layers=3)
    with pytest.raises(ConfigError, match=r"its architecture is not that of model\.path"):
        with_student(start, other, ALL_WEIGHTS)
