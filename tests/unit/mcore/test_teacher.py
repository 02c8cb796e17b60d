"""The frozen teacher costs its weights: no gradients, no optimizer state, no kept activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dms_train.mcore import compat
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.offload import OffloadedTeacher
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny


def engine(
    view: ParallelView, layers: int = 2, offloads: bool = False, **parallel: Any
) -> McoreEngine:
    """With a teacher of other weights than the student's."""
    architecture = tiny.architecture("qwen2", num_layers=layers)
    spec = PRESETS["dms"].override(window=4)
    options = TrainEngineOptions(
        parallel=ParallelOptions(**parallel),
        optim=OptimOptions(lr=1e-3),
        seed=7,
        offloads_teacher=offloads,
    )
    eviction_channels = tiny.SmallEvictionChannels(architecture, 1, spec.channel)
    built = McoreEngine(architecture, spec, view, options, eviction_channels)
    built.attach_teacher(RandomWeights(architecture, 2, 0.2))
    return built


def kept_bytes(built: McoreEngine, loss: Any) -> int:
    """Return the bytes of all tensors that a pass keeps for its backward pass."""
    kept: list[Tensor] = []  # referenced to the end, so that no address is used twice

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    plan = StepPlan(step=3, eviction="soft", channel_scale=0.0, target_cr=4.0, loss=loss)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        built.forward_backward(plan, tiny.microbatches(0, 1, groups=1))
    return sum({s.data_ptr(): s.nbytes() for s in map(Tensor.untyped_storage, kept)}.values())


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_distilling_keeps_as_much_as_training_without_a_teacher(
    view: ParallelView, recompute: str | None
) -> None:
    built = engine(view, recompute_granularity=recompute)
    alone = kept_bytes(built, "lm")
    assert alone > 0
    assert kept_bytes(built, "distill") == alone


def test_its_weights_have_no_gradient_and_no_optimizer_state(view: ParallelView) -> None:
    built = engine(view)
    teacher = built._models[0].teacher
    assert teacher is not None
    trained = {
        id(parameter)
        for part in compat.optimizer_parts(built._optimizer)
        for parameter in part.model_param_group_index_map
    }
    assert trained == {id(parameter) for parameter in built._models[0].parameters()}
    kept_bytes(built, "distill")
    for parameter in teacher.parameters():
        assert id(parameter) not in trained
        assert not parameter.requires_grad
        assert parameter.grad is None
        assert not hasattr(parameter, "main_grad")


def losses(built: McoreEngine) -> list[float]:
    """Take two steps of two micro-batches, and evaluate; return each loss."""
    built.begin_stage(
        LearningRate(max_lr=1e-2, min_lr=1e-2, steps=2, warmup_steps=0, style="constant")
    )
    steps = [
        StepPlan(step=n, stage_step=n, eviction="soft", channel_scale=0.0, target_cr=4.0)
        for n in range(2)
    ]
    batches = tiny.microbatches(0, 1, groups=2)
    trained = [built.train_step(plan, batches).loss for plan in steps]
    return [*trained, built.evaluate(steps[-1], batches).loss]


# five layers in units of one, and in recomputed units that do not divide them
@pytest.mark.parametrize("unit", [None, 2])
def test_an_offloaded_teacher_computes_the_same_with_two_layers_at_a_time(
    view: ParallelView, unit: int | None
) -> None:
    parallel: dict[str, Any] = {}
    if unit is not None:
        parallel = {"recompute_granularity": "full", "recompute_num_layers": unit}
    resident = losses(engine(view, layers=5, **parallel))
    built = engine(view, layers=5, offloads=True, **parallel)
    teacher = built._models[0]._teacher[0]
    assert isinstance(teacher, OffloadedTeacher)
    layers = teacher._model.decoder.layers
    host = [layer.mlp.linear_fc1.weight.data_ptr() for layer in layers]
    during: list[int] = []
    slots: list[Tensor] = []
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda layer, _: during.append(layer.mlp.linear_fc1.weight.data_ptr())
        )
    layers[0].register_forward_hook(lambda *_: slots.extend(teacher._slots))
    assert losses(built) == resident
    # six passes, and between them no weight of a layer lies in a slot
    assert len(during) == 6 * 5
    assert len(set(during[:5])) == 2
    assert not set(host) & set(during)
    assert [layer.mlp.linear_fc1.weight.data_ptr() for layer in layers] == host
    assert teacher._slots == []
    assert {slot.numel() for slot in slots} == {teacher._layers[0].flat.numel()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_copied_teacher_has_the_weights_of_one_that_was_read(
    view: ParallelView, dtype: str
) -> None:
    architecture = tiny.architecture("qwen2", num_layers=2)
    source = RandomWeights(architecture, 2, 0.2)
    options = TrainEngineOptions(
        parallel=ParallelOptions(params_dtype=dtype), optim=OptimOptions(lr=1e-3), seed=7
    )
    teachers = []
    for given in (None, source):
        built = McoreEngine(architecture, PRESETS["dms"], view, options, source)
        built.attach_teacher(given)
        teachers.append(dict(built._models[0]._teacher[0].named_parameters()))
        built.reset_eviction_channel()  # of the student alone
    copied, read = teachers
    assert copied.keys() == read.keys()
    assert all(torch.equal(copied[name], read[name]) for name in read)
    assert all(copied[name].dtype == read[name].dtype for name in read)
