"""A step after loading weights starts from them, not from what the engine was built with.

In 16-bit training the optimizer updates fp32 copies; loading has to replace those as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dms_train.app.start_point import StartPoint, load_start
from dms_train.hf.weight_reader import WeightReader
from dms_train.mcore import compat
from dms_train.mcore.engine import McoreEngine
from dms_train.mcore.errors import ModelError
from dms_train.mcore.model.weights import RandomWeights
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.training.state import TrainState
from tests.support import tiny

LR = 1e-6
RATE = LearningRate(max_lr=LR, min_lr=LR, steps=1, warmup_steps=0, style="constant")

Build = Callable[..., McoreEngine]
Weights = dict[str, Tensor]


def from_checkpoint(engine: McoreEngine, build: Build, folder: Path) -> None:
    """As `run.load` does it with the folder of a checkpoint."""
    other = build("llama", "dms", "bf16", trains=False)
    other.load_hf(source(engine))
    other.save_weights(folder / "saved", {})
    load_start(engine, start(engine, folder / "saved"))


def from_export(engine: McoreEngine, _build: Build, folder: Path) -> None:
    """As `run.load` does it with a Hugging Face directory."""
    names = [name for name, _ in engine.hf_tensors()]
    tensors = {name: source(engine).get(name).bfloat16() for name in names}
    save_file(tensors, folder / "model.safetensors")
    assert set(WeightReader(folder).names()) == set(names)
    load_start(engine, start(engine, folder))


def start(engine: McoreEngine, student: Path) -> StartPoint:
    empty = StartPoint(
        architecture=engine.architecture, model_dir=None, tokenizer_dir=None, state=TrainState()
    )
    return replace(empty, student=student)


def source(engine: McoreEngine) -> RandomWeights:
    """Other weights than those the engine is built with."""
    return RandomWeights(engine.architecture, 5, 0.2)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("load", [from_checkpoint, from_export])
def test_a_step_at_a_tiny_learning_rate_moves_loaded_weights_by_no_more(
    build: Build, load: Any, dtype: str, tmp_path: Path
) -> None:
    engine = build("llama", "dms", dtype)
    built = {name: tensor.float() for name, tensor in engine.hf_tensors()}
    load(engine, build, tmp_path)
    loaded = {name: tensor.float() for name, tensor in engine.hf_tensors()}
    assert max((loaded[n] - built[n]).abs().max() for n in loaded) > 0.5
    engine.begin_stage(RATE)
    assert not engine.train_step(StepPlan(loss="lm"), tiny.microbatches(0, 1)).skipped
    moved = {n: (t.float() - loaded[n]).abs().max().item() for n, t in engine.hf_tensors()}
    # Adam's first update is the learning rate; the weights round as they are stored
    assert not {name: distance for name, distance in moved.items() if distance > 2 * LR}
    assert max(moved.values()) > 0


def masters(engine: McoreEngine) -> list[Tensor]:
    """Copies of the fp32 weights that the optimizer updates, and of frozen weights in fp32."""
    parts = compat.optimizer_parts(engine._optimizer)
    part_of = {p: part for part in parts for p in part.model_param_gbuf_map}
    return [
        compat.parameter_state(part_of[parameter], parameter)["param"].detach().clone()
        if parameter.requires_grad
        else parameter.detach().float().flatten()
        for parameter in engine._models[0].parameters()
    ]


@pytest.mark.parametrize(
    ("family", "train", "with_masters"),
    [
        ("llama", "all", True),
        ("llama", "all", False),
        ("llama", "attention", True),
        ("qwen3_moe", "all", True),
        ("qwen3_moe", "attention", True),
    ],
)
def test_a_loaded_checkpoint_gives_its_fp32_weights(
    build: Build, family: str, train: str, with_masters: bool, tmp_path: Path
) -> None:
    """Expect the bf16 weights where it has none: weights that were frozen, or not saved."""
    trained = build(family, "dms", "bf16", train=train)
    trained.begin_stage(replace(RATE, max_lr=1e-3, min_lr=1e-3))
    trained.train_step(StepPlan(loss="lm"), tiny.microbatches(0, 1))
    save = trained.save if with_masters else trained.save_weights
    save(tmp_path / "saved", {})
    engine = build(family, "dms", "bf16")
    engine.load_hf(source(engine))
    load_start(engine, start(engine, tmp_path / "saved"))
    engine.set_channel(1)  # as method.channel=auto does before the first step
    expected = masters(trained)
    rounded = [tensor.bfloat16().float() for tensor in expected]
    assert any(
        (exact - near).abs().max() > 0 for exact, near in zip(expected, rounded, strict=True)
    )
    for found, wanted in zip(masters(engine), expected if with_masters else rounded, strict=True):
        assert torch.equal(found, wanted)
    parts = compat.optimizer_parts(engine._optimizer)
    states = [state for part in parts for state in part.optimizer.state.values()]
    moments = [state["exp_avg"] for state in states if state]
    assert not any(moment.any() for moment in moments)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_checkpoint_whose_weights_are_not_finite_is_refused_by_name(
    build: Build, bad: float, tmp_path: Path
) -> None:
    engine = build("qwen2", "dms", trains=False)
    engine._models[0].decoder.layers[1].self_attention.linear_qkv.bias.data[3] = bad
    engine.save_weights(tmp_path / "saved", {})
    named = r"saved: decoder\.layers\.1\.self_attention\.linear_qkv\.bias holds NaN or infinite"
    with pytest.raises(ModelError, match=named):
        build("qwen2", "dms", trains=False).load(tmp_path / "saved", with_optimizer=False)
