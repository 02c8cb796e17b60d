"""What of the captured passes a CPU can check; `tests/gpu/test_graph.py` compares the steps."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.errors import ModelError
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.mcore.schedule.graph import StepInputs, serves
from dms_train.method.spec import PRESETS
from dms_train.training.stages import Stage, build_stages
from tests.support import configs, tiny


def scale(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_inputs_take_another_step_at_the_same_addresses() -> None:
    first, second = tiny.microbatches(0, 1, groups=2), tiny.microbatches(1, 2, groups=4)
    inputs = StepInputs(first, scale(0.5))
    tensors = [inputs.scale, *(tensor for batch in inputs.batches for tensor in batch[:4])]
    addresses = [tensor.data_ptr() for tensor in tensors]
    given = [batch.map(torch.clone) for batch in second]
    inputs.fill(given, scale(0.25))
    for batch in given:  # the step that was given may change afterwards
        batch.map(torch.Tensor.zero_)
    expected = [scale(0.25), *(tensor for batch in second for tensor in batch[:4])]
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    for found, right in zip(tensors, expected, strict=True):
        assert torch.equal(found, right)
    assert not torch.equal(first[0].tokens, second[0].tokens)


@pytest.mark.parametrize(
    "other", [tiny.microbatches(0, 1, groups=1), tiny.microbatches(0, 1, groups=2, length=23)]
)
def test_inputs_of_other_shapes_are_refused(other: list) -> None:
    inputs = StepInputs(tiny.microbatches(0, 1, groups=2), scale(1.0))
    with pytest.raises(ModelError, match="changed from"):
        inputs.fill(other, scale(1.0))


def test_packed_documents_are_refused() -> None:
    batch = tiny.packed(tiny.batch(0), [[11, 1, 9], [8, 16]])
    with pytest.raises(ModelError, match=r"set data\.packing=false"):
        StepInputs([batch], scale(1.0))


def test_it_serves_the_steps_of_pretrain_alone() -> None:
    options = configs.config().stage
    served = {}
    for name in ("pretrain", "zero_neuron", "retrofit", "hold"):
        changed = configs.config(stage__run=[name], run__load="x").stage
        assert changed.pretrain == options.pretrain
        (stage,) = build_stages(changed, warmup=2, loaded_cr=1.0)
        assert isinstance(stage, Stage)
        plans = [stage.plan(step, step) for step in range(stage.steps)]
        served[name] = {serves(plan) for plan in plans}
        if name == "pretrain":
            assert all(before != after for before, after in pairwise(plans))
    assert served == {name: {name == "pretrain"} for name in served}


def test_an_engine_on_a_cpu_refuses_it(view: ParallelView) -> None:
    architecture = tiny.architecture("llama", num_layers=1)
    options = TrainEngineOptions(
        parallel=ParallelOptions(), optim=OptimOptions(lr=1e-3), seed=7, cuda_graph=True
    )
    with pytest.raises(ModelError, match=r"cuda_graph=true: needs a GPU .* runs on the CPU"):
        McoreEngine(
            architecture, PRESETS["dms"], view, options, RandomWeights(architecture, 1, 0.2)
        )
