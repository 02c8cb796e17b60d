"""Parts of the captured passes that a CPU can check; `tests/gpu/test_graph.py` compares steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from dms_train.kernels import dispatch
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.errors import ModelError
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers.attention import MethodState
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.mcore.schedule.graph import GraphInputs, choose_graph
from dms_train.method.noise import sample_keys
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from dms_train.training.stages import Stage, build_stages
from tests.support import configs, tiny

CPU = torch.device("cpu")


def scale(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def state(preset: str, fused_on: torch.device | None) -> MethodState:
    return MethodState(PRESETS[preset], dispatch.train_attention("reference"), fused_on=fused_on)


def test_inputs_take_another_microbatch_at_the_same_addresses() -> None:
    first, second = tiny.batch(0), tiny.batch(1)
    inputs = GraphInputs(first, scale(0.5))
    tensors = [inputs.scale, *inputs.batch[:4]]
    addresses = [tensor.data_ptr() for tensor in tensors]
    given = second.map(torch.clone)
    inputs.fill(given, scale(0.25))
    given.map(torch.Tensor.zero_)  # the microbatch that was given may change afterwards
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    for found, right in zip(tensors, [scale(0.25), *second[:4]], strict=True):
        assert torch.equal(found, right)
    assert not torch.equal(first.tokens, second.tokens)


def test_inputs_have_no_documents() -> None:
    packed = tiny.packed(tiny.batch(0), [[12, 4], [16]])
    with pytest.raises(AssertionError):
        GraphInputs(packed, scale(1.0))


def test_inputs_of_other_shapes_are_refused() -> None:
    inputs = GraphInputs(tiny.batch(0), scale(1.0))
    with pytest.raises(ModelError, match="changed from"):
        inputs.fill(tiny.batch(0, length=23), scale(1.0))


@pytest.mark.parametrize("name", ["pretrain", "zero_neuron", "retrofit", "hold"])
def test_the_steps_of_a_stage_are_one_computation(name: str) -> None:
    """Numbers that differ from step to step are read from tensors, so one graph serves them."""
    pytest.importorskip("triton")
    method = state("dms", CPU)
    stage_options = configs.config(stage__run=[name], run__load="x").stage
    (stage,) = build_stages(stage_options, warmup=2, loaded_cr=1.0)
    assert isinstance(stage, Stage)
    plans = [stage.plan(step, step) for step in range(stage.steps)]
    assert len({method.computation(plan) for plan in plans}) == 1
    assert all(before != after for before, after in pairwise(plans))


@pytest.mark.parametrize(
    "other",
    [
        {"eviction": "hard"},
        {"noise": False},
        {"loss": "lm"},
        {"eviction": "none"},
    ],
)
def test_plans_that_compute_something_else_need_another_graph(other: dict) -> None:
    method, plan = state("dms", CPU), StepPlan(eviction="soft", channel_scale=0.0)
    assert method.computation(replace(plan, **other)) != method.computation(plan)


def test_the_factor_of_merges_is_part_of_their_computation() -> None:
    pytest.importorskip("triton")
    method = state("dmc", CPU)
    zeroing, after = StepPlan(channel_scale=0.5), StepPlan(channel_scale=0.0)
    assert method.computation(zeroing) != method.computation(after)


def test_without_fused_kernels_every_step_is_a_computation_of_its_own() -> None:
    """Other kernels read numbers on the host, where a replay would repeat old ones."""
    method = state("dms", None)
    first, second = (StepPlan(step=n, eviction="soft", target_cr=n) for n in (2, 3))
    assert method.computation(first) != method.computation(second)


@pytest.mark.parametrize(
    ("options", "model", "reason"),
    [
        ({}, {"fused": False}, "set kernels=triton"),
        ({"recompute_granularity": "full"}, {}, "random states"),
        ({"tensor_model_parallel_size": 2}, {}, "the 2 ranks of a copy"),
        ({"context_parallel_size": 2}, {}, "the 2 ranks of a copy"),
        ({}, {"packed": True}, r"set data\.packing=false"),
        ({}, {"experts": 4}, "counts the tokens of each"),
        ({}, {"linear": True}, "linear attention"),
    ],
)
def test_layouts_that_cannot_be_captured_run_eagerly_or_are_refused(
    view: ParallelView, options: dict, model: dict, reason: str
) -> None:
    gpu = replace(view, device=torch.device("cuda"))  # no GPU is used before the refusal
    model = {"fused": True, **model}
    assert choose_graph(ParallelOptions(**options), gpu, **model) is None
    with pytest.raises(ModelError, match=reason):
        choose_graph(ParallelOptions(cuda_graph="always", **options), gpu, **model)


def test_fused_layers_read_the_numbers_of_a_step_at_addresses_that_stay() -> None:
    pytest.importorskip("triton")
    plain, fused = state("dms", None), state("dms", CPU)
    tensors = fused.step, fused.target, fused.channel_scale
    for step, ratio, factor in ((3, 2.0, 0.25), (70_000, 5.0, 0.0)):
        plan = StepPlan(step=step, target_cr=ratio, channel_scale=factor)
        for each in (plain, fused):
            each.set_plan(plan)
        assert (plain.step, plain.target, plain.channel_scale) == (step, 1 - 1 / ratio, factor)
        assert [x.item() for x in tensors] == [step, 1 - 1 / ratio, factor]
    assert fused.step is tensors[0]


@pytest.mark.parametrize("step", [0, 1, 2**31])
def test_a_step_on_the_device_gives_the_same_noise_keys(step: int) -> None:
    samples = torch.tensor([0, 5, 2**40])
    on_device = torch.tensor(step)
    assert torch.equal(sample_keys(7, on_device, samples), sample_keys(7, step, samples))


def test_an_engine_on_a_cpu_refuses_it(view: ParallelView) -> None:
    architecture = tiny.architecture("llama", num_layers=1)
    options = TrainEngineOptions(
        parallel=ParallelOptions(cuda_graph="always"), optim=OptimOptions(lr=1e-3), seed=7
    )
    with pytest.raises(ModelError, match=r"cuda_graph=always: needs a GPU .* runs on the CPU"):
        McoreEngine(
            architecture, PRESETS["dms"], view, options, RandomWeights(architecture, 1, 0.2)
        )
