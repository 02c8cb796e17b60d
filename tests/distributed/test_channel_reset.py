"""Resetting the eviction channel changes its own rows and nothing else, however it is spread.

Real processes: three data-parallel ranks, which share the optimizer's state in parts that end
inside a projection, and two tensor-parallel ranks, which share the heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from dms_train.mcore import compat, groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model import gathering
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny
from tests.support.matrix import FULL_MATRIX
from tests.support.ranks import values_of_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp3": (3, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
}
CASES = [("qwen2", "dms", "fp32"), ("qwen3", "dms_fastdms", "bf16")]  # with biases; last channel
if FULL_MATRIX:
    CASES += [("qwen2", "dms", "bf16"), ("qwen3", "dms_fastdms", "fp32")]
KINDS = ("param", "exp_avg", "exp_avg_sq")  # what the optimizer keeps of a parameter
STEPS = 2


def build(view: ParallelView, layout: str, case: tuple[str, str, str]) -> McoreEngine:
    family, preset, dtype = case
    # sizes with which a third of all elements ends inside a q, k, v projection
    architecture = tiny.architecture(family, num_layers=2, ffn_hidden_size=24)
    spec = PRESETS[preset].override(window=4)
    options = TrainEngineOptions(
        parallel=ParallelOptions(**LAYOUTS[layout][1], params_dtype=dtype),
        optim=OptimOptions(lr=1e-3),
        seed=7,
    )
    source = tiny.SmallEvictionChannels(architecture, 1, spec.channel, factor=1.0)
    return McoreEngine(architecture, spec, view, options, source)


def train(engine: McoreEngine) -> None:
    rate = LearningRate(max_lr=1e-3, min_lr=1e-3, steps=STEPS, warmup_steps=0, style="constant")
    engine.begin_stage(rate)
    view = engine.view
    for step in range(STEPS):
        plan = StepPlan(step=step, stage_step=step, channel_scale=0.5, loss="lm")
        engine.train_step(plan, tiny.microbatches(view.dp_rank, view.dp_size, view.dp_size))


def kept(engine: McoreEngine, parameter: Any, kind: str) -> Tensor:
    """The whole of what data ranks keep in parts; each element counts once."""
    whole = torch.zeros(parameter.numel())
    holders = torch.zeros(parameter.numel())
    for part in compat.optimizer_parts(engine._optimizer):
        if parameter in part.model_param_group_index_map:
            held = part._get_model_param_range_map(parameter)["param"]
            tensors = part._get_main_param_and_optimizer_states(parameter)
            whole[held.start : held.end] = tensors[kind].detach()
            holders[held.start : held.end] = 1
    for tensor in (whole, holders):
        dist.all_reduce(tensor, group=engine.view.dp_group)
    assert (holders == 1).all()
    return whole.view_as(parameter)


def state(engine: McoreEngine) -> dict[str, Tensor]:
    """By kind and Hugging Face name, on rank 0."""
    found = {f"weight/{name}": tensor.clone() for name, tensor in engine.hf_tensors()}
    for kind in KINDS:
        whole = {
            parameter: kept(engine, parameter, kind)
            for model in engine._models
            for parameter in model.parameters()
        }
        read = whole.__getitem__
        for _, named in gathering.gather(engine._models, engine.architecture, engine.view, read):
            found |= {f"{kind}/{name}": tensor for name, tensor in named.items()}
    return found


def split(engine: McoreEngine) -> bool:
    """Return True if a data rank holds a part of a q, k, v projection that starts inside of it."""
    starts = [
        part._get_model_param_range_map(layer.self_attention.linear_qkv.weight)["param"].start
        for part in compat.optimizer_parts(engine._optimizer)
        for layer in engine._models[0].decoder.layers
        if layer.self_attention.linear_qkv.weight in part.model_param_group_index_map
    ]
    return any(groups.values(any(start > 0 for start in starts)))


def work(layout: str, out: Path) -> None:
    view = groups.start(ParallelOptions(**LAYOUTS[layout][1]), seed=1)
    for case in CASES:
        engine = build(view, layout, case)
        train(engine)
        before = state(engine)
        engine.reset_eviction_channel()
        after = state(engine)
        assert split(engine) == (layout == "dp3")
        # each data rank has weights of its own, which the next update does not replace
        same = groups.values(sum(p.double().sum().item() for p in engine._models[0].parameters()))
        assert layout != "dp3" or len(set(same)) == 1
        if view.rank == 0:
            name = "-".join((layout, *case))
            save_file(before, out / f"{name}-before.safetensors")
            save_file(after, out / f"{name}-after.safetensors")
    groups.stop()


@pytest.fixture(scope="module", params=LAYOUTS)
def stem(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reset")
    processes, _ = LAYOUTS[request.param]
    values_of_ranks(work, processes, request.param, out)
    return out / request.param


def channel_rows(name: str, family: str, preset: str) -> list[int]:
    """Return the channel's rows of a Hugging Face tensor: one of q_proj for each KV head."""
    if "q_proj" not in name:
        return []
    a = tiny.architecture(family)
    heads = range(0, a.num_attention_heads, a.num_attention_heads // a.num_query_groups)
    channel = PRESETS[preset].channel % a.kv_channels
    return [head * a.kv_channels + channel for head in heads]


@pytest.mark.parametrize("kind", ["weight", *KINDS])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_channels_rows_are_zero_and_all_others_as_before(
    stem: Path, case: tuple[str, str, str], kind: str
) -> None:
    family, preset, _ = case
    name = "-".join((stem.name, *case))
    before = load_file(stem.with_name(f"{name}-before.safetensors"))
    after = load_file(stem.with_name(f"{name}-after.safetensors"))
    wrong = []
    for key, old in before.items():
        if not key.startswith(f"{kind}/"):
            continue
        rows = channel_rows(key, family, preset)
        assert not rows or (old[rows].abs().reshape(len(rows), -1).amax(1) > 0).all(), key
        expected = old.clone()
        expected[rows] = 0
        if not torch.equal(after[key], expected):
            wrong.append((key, (after[key] != expected).sum().item()))
    assert not wrong  # (tensor, number of wrong elements)
