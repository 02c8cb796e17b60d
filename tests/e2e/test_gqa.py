"""Fewer KV heads, trained, then retrofitted with each method: dms-gqa before dms-train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dms_train.hf.architecture import Architecture
from dms_train.hf.directory import read_architecture
from tests.support import launch, refusals

SHORT = (
    "data.seq_length=96",
    "data.micro_batch_size=4",
    "data.global_batch_size=4",
    "run.eval_samples=4",
    "run.save_interval=0",
    "run.check_teacher=false",  # hardly trained
    "observe.wandb=disabled",
)


def train(*overrides: str) -> None:
    launch.checked(launch.module("dms_train", *SHORT, *overrides))


def losses(run: Path) -> list[float]:
    """Loss of every step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Exam sheets, and the model with 2 of 4 KV heads, trained for a few steps."""
    root = tmp_path_factory.mktemp("gqa")
    sheets = ("exam-sheets", "--out", str(root / "sheets"), "--sheets", "60")
    launch.checked(launch.module("dms_train.data_prep.prepare", *sheets))
    refusals.write_model(root / "original", root / "sheets" / "tokenizer", num_query_groups=4)
    words = (str(root / "original"), str(root / "pooled"), "--kv-heads", "2")
    launch.checked(launch.module("dms_train.checkpoints_tools.pool_kv_heads", *words))
    train(
        "stage=pretrain",
        "stage.pretrain.steps=6",
        "stage.pretrain.min_lr_ratio=1",
        "optim.lr=2e-3",
        f"model.path={root}/pooled",
        f"data.paths=[{root}/sheets/train]",
        f"run.dir={root}/trained",
    )
    return {"root": root, "model": root / "trained" / "exports" / "final" / "hf"}


def test_the_pooled_model_is_trained_from_its_own_weights(pooled: dict[str, Any]) -> None:
    before = read_architecture(pooled["root"] / "original")
    after = read_architecture(pooled["model"])
    assert (before.num_query_groups, after.num_query_groups) == (4, 2)
    assert after == Architecture(
        **{**{f: getattr(before, f) for f in before.__slots__}, "num_query_groups": 2}
    )
    found = losses(pooled["root"] / "trained")
    assert len(found) == 6
    assert found[-1] < found[0] - 0.1


@pytest.mark.parametrize(
    "method",
    [
        ("method=dms", "method.window=8"),
        ("method=dmc", "method.window=0", "stage.export.format=dmc"),
    ],
    ids=["dms", "dmc"],
)
def test_a_pooled_model_is_retrofitted_exported_and_generates(
    pooled: dict[str, Any], method: tuple[str, ...]
) -> None:
    from dms_train import LLM, SamplingParams

    root = pooled["root"]
    run = root / method[0].replace("=", "-")
    train(
        *method,
        f"model.path={pooled['model']}",
        f"data.paths=[{root}/sheets/train]",
        "stage.zero_neuron.steps=2",
        "stage.retrofit.steps_per_cr=4",
        "stage.retrofit.target_cr=2",
        "stage.export.every_integer_cr=false",
        f"run.dir={run}",
    )
    export = run / "exports" / "final" / "hf"
    verified = launch.module("dms_train.checkpoints_tools.verify", str(export))
    assert "PASS" in launch.checked(verified)
    output = LLM(str(export), device="cpu").generate(
        "1: Solve 4*c + 15 = 6*c - 15 for c.\n", SamplingParams(max_tokens=8, temperature=0.0)
    )[0]
    assert len(output.outputs[0].token_ids) == 8
    assert output.kv.cr_factor >= 1
