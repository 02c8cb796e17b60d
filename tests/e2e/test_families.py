"""Models of the more unusual families are retrofitted, exported, verified, and generate.

By default one with local layers, one with experts and one with linear attention; the others are
slow tests.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from dms_train import LLM, SamplingParams
from dms_train.families import LayerAttention
from tests.support import launch, refusals, yarn
from tests.support.experts import experts_of
from tests.support.plain_delta import sizes_of

LAYERS = (LayerAttention(rotary_base=1e3, window=16), LayerAttention(rotary_base=1e4))
HYBRID = {
    "layers": (LayerAttention(rotary_base=None, linear=True), LAYERS[1]),
    "linear": sizes_of("qwen3_5_text"),
    "partial_rotary_factor": 0.5,
}
MODELS = {
    "gemma3_text": {"layers": LAYERS},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt_oss": {
        "layers": (replace(LAYERS[1], window=16), LAYERS[1]),
        "rope_scaling": yarn.UNROUNDED,
        "experts": experts_of("gpt_oss"),
        "ffn_hidden_size": 24,
    },
    "olmo3": {"layers": LAYERS, "rope_scaling": yarn.RULE},
    "phi3": {"partial_rotary_factor": 0.5},
    "qwen3_5_text": HYBRID,
    "qwen3_next": {**HYBRID, "experts": experts_of("qwen3_next")},
    "qwen3_moe": {"experts": experts_of("qwen3_moe")},
}


DEFAULT = ("gemma3_text", "gpt_oss", "qwen3_5_text")


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in MODELS],
)
def test_a_model_is_retrofitted_exported_and_generates(tmp_path: Path, family: str) -> None:
    sheets = ("exam-sheets", "--out", str(tmp_path / "sheets"), "--sheets", "40")
    launch.checked(launch.module("dms_train.data_prep.prepare", *sheets))
    refusals.write_model(
        tmp_path / "model",
        tmp_path / "sheets" / "tokenizer",
        family=family,
        **MODELS[family],
    )
    settings = {
        "model.path": tmp_path / "model",
        "data.paths": f"[{tmp_path}/sheets/train]",
        "data.seq_length": 96,
        "data.micro_batch_size": 2,
        "data.global_batch_size": 4,
        "method.window": 8,
        "stage.zero_neuron.steps": 2,
        "stage.retrofit.steps_per_cr": 4,
        "stage.retrofit.target_cr": 2,
        "stage.export.every_integer_cr": "false",
        "run.dir": tmp_path / "run",
        "run.eval_samples": 4,
        "run.check_teacher": "false",  # random weights
        "observe.wandb": "disabled",
    }
    launch.checked(
        launch.module("dms_train", *(f"{key}={value}" for key, value in settings.items()))
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [row["train/loss"] for row in map(json.loads, lines) if "train/loss" in row]
    assert len(losses) == 6
    assert all(map(math.isfinite, losses))
    export = str(tmp_path / "run" / "exports" / "final" / "hf")
    verified = launch.module("dms_train.checkpoints_tools.verify", export)
    assert "PASS" in launch.checked(verified)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    output = LLM(export, device="cpu").generate("1: Solve 4*c + 15 = 6*c - 15 for c.\n", params)[0]
    assert len(output.outputs[0].token_ids) == 8
