"""A run refuses a teacher that predicts no better than by guessing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dms_train.app.teacher_check import TeacherError, check_teacher
from dms_train.method.plan import StepPlan
from tests.support import launch
from tests.support.wiring import Assets, Built

TRAINED = launch.ROOT / "dms_train" / "assets" / "exam_teacher"
KNOWN = {"model.path": str(TRAINED), "data.seq_length": 256}
NO_EVICTION = StepPlan(loss="distill")


def check(run: Built) -> None:
    check_teacher(run.prepared, run.engine, run.components.source)


def damaged(folder: Path, factor: float) -> Path:
    """The embedded teacher with all matrices of its layers multiplied by a factor."""
    shutil.copytree(TRAINED, folder)
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor *= factor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_trained_teacher_is_accepted_and_its_loss_logged(
    built: Callable[..., Built], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        check(built(**{**KNOWN}))
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("teacher:")]
    assert 0 < float(line.split()[1]) < 3


@pytest.mark.parametrize("kind", ["random", "zero"])
def test_a_silent_teacher_is_refused(
    built: Callable[..., Built], assets: Assets, tmp_path: Path, kind: str
) -> None:
    """run.check_teacher"""
    path = assets.model if kind == "random" else damaged(tmp_path / "zero", 0.0)
    changes = {"model.path": str(path)}
    with pytest.raises(TeacherError) as refused:
        check(built(**changes))
    (line,) = refused.value.problems
    assert f"model.path={path}: the teacher's loss" in line
    assert "guessing has 3.91" in line  # log(50)
    assert "or set run.check_teacher=false" in line
    check(built(**changes, **{"run.check_teacher": False}))


def test_a_teacher_whose_loss_is_not_a_number_is_refused(
    built: Callable[..., Built], tmp_path: Path
) -> None:
    run = built(**{**KNOWN})
    (teacher,) = run.engine._models[0]._teacher
    with torch.no_grad():
        teacher.embedding.word_embeddings.weight.fill_(float("nan"))
    with pytest.raises(TeacherError, match="is nan nats per token"):
        check(run)


@pytest.mark.parametrize("train", ["all", "attention", "lora"])
def test_the_teacher_is_measured_and_not_the_student(
    built: Callable[..., Built], train: str
) -> None:
    """A student that does not know the data has a teacher that does."""
    run = built(**{**KNOWN, "method.train": train})
    for name, parameter in run.engine._models[0].named_parameters():
        if parameter.requires_grad and "linear_qkv" in name:
            parameter.data.normal_()
    check(run)
    assert run.engine.evaluate(NO_EVICTION, run.batches).token_loss > 1


def test_a_run_without_distillation_has_no_teacher_to_check(
    built: Callable[..., Built], assets: Assets
) -> None:
    check(built(**{"model.path": str(assets.model), "stage.run": ["pretrain"]}))
