"""AdamW on the CPU inside megatron's distributed optimizer: steps, weights and checkpoints.

The copies from and to a GPU are tested in `tests/gpu/test_optimizer_memory.py`; the rest is the
same on a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dms_train.mcore import compat, host_adam
from dms_train.mcore.engine import McoreEngine
from dms_train.mcore.errors import ModelError
from dms_train.mcore.host_adam import HostAdamW
from dms_train.mcore.schedule import optimizer as optim
from dms_train.method.plan import LearningRate, StepPlan
from tests.support import tiny

RATE = LearningRate(max_lr=1e-3, min_lr=1e-3, steps=9, warmup_steps=0, style="constant")
STEPS = 3


def offloaded(engine: McoreEngine) -> McoreEngine:
    """Give an engine the optimizer of `optim.offload`, which it refuses without a GPU."""
    options = replace(engine._options.optim, offload=True, weight_decay=0.1)
    engine._optimizer = optim.build_optimizer(options, engine._config, engine._chunks)
    assert all(isinstance(part.optimizer, HostAdamW) for part in parts(engine))
    engine.begin_stage(RATE)
    return engine


def plain(engine: McoreEngine) -> McoreEngine:
    options = replace(engine._options.optim, weight_decay=0.1)
    engine._optimizer = optim.build_optimizer(options, engine._config, engine._chunks)
    engine.begin_stage(RATE)
    return engine


def parts(engine: McoreEngine) -> list[Any]:
    return compat.optimizer_parts(engine._optimizer)


def train(engine: McoreEngine, first: int = 0, last: int = STEPS) -> list[float]:
    losses = []
    for number in range(first, last):
        plan = StepPlan(step=number, stage_step=number, loss="lm")
        result = engine.train_step(plan, tiny.microbatches(0, 1, groups=2 + number))
        assert not result.skipped
        losses.append(result.loss)
    return losses


def states(engine: McoreEngine) -> list[dict[str, Tensor]]:
    return [
        compat.parameter_state(part, parameter)
        for part in parts(engine)
        for parameter in part.model_param_group_index_map
    ]


def assert_equal_states(found: McoreEngine, expected: McoreEngine, **bounds: float) -> None:
    for mine, other in zip(states(found), states(expected), strict=True):
        for name in ("param", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine[name], other[name].detach(), **bounds)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("piece", [1000, 2**25])
def test_steps_are_those_of_the_optimizer_on_the_device(
    build: Any, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str, piece: int
) -> None:
    monkeypatch.setattr(host_adam, "HOST_PIECE", piece)
    mine, other = offloaded(build(family, "dms", dtype)), plain(build(family, "dms", dtype))
    threads = torch.get_num_threads()
    assert train(mine) == pytest.approx(train(other), rel=1e-5)
    assert torch.get_num_threads() == threads
    assert_equal_states(mine, other, rtol=1e-4, atol=1e-6)
    for (name, weight), (_, expected) in zip(mine.hf_tensors(), other.hf_tensors(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-2, atol=1e-6, msg=name)


def test_no_weight_of_the_optimizer_shares_memory_with_the_model(build: Any) -> None:
    engine = offloaded(build("llama", "dms", "fp32"))
    train(engine, last=1)
    model = {p.untyped_storage().data_ptr() for p in engine._models[0].parameters()}
    for state in states(engine):
        assert state["param"].untyped_storage().data_ptr() not in model


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("moves", [(offloaded, plain), (plain, offloaded), (offloaded, offloaded)])
def test_a_checkpoint_goes_on_in_either_memory(
    build: Any, tmp_path: Path, dtype: str, moves: tuple[Any, Any]
) -> None:
    wrote = moves[0](build("qwen2", "dms", dtype))
    train(wrote, last=2)
    wrote.save(tmp_path / "step", {})
    loaded = moves[1](build("qwen2", "dms", dtype))
    train(loaded, first=5, last=6)  # a state that loading must replace
    loaded.load(tmp_path / "step", with_optimizer=True)
    loaded.begin_stage(RATE)
    assert_equal_states(loaded, wrote, rtol=0.0, atol=0.0)
    found, expected = train(loaded, first=2, last=4), train(wrote, first=2, last=4)
    assert found == pytest.approx(expected, rel=1e-5)
    assert_equal_states(loaded, wrote, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_in_the_background_keeps_the_state_from_when_it_began(
    build: Any, tmp_path: Path
) -> None:
    wrote, kept = offloaded(build("qwen2", "dms", "bf16")), offloaded(build("qwen2", "dms", "bf16"))
    train(wrote, last=2)
    train(kept, last=2)
    wrote.save(tmp_path / "step", {}, wait=False)
    train(wrote, first=2, last=5)
    wrote.finish_save(wait=True)
    loaded = offloaded(build("qwen2", "dms", "bf16"))
    loaded.load(tmp_path / "step", with_optimizer=True)
    assert_equal_states(loaded, kept, rtol=0.0, atol=0.0)


def test_a_skipped_update_changes_nothing(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, kept = (offloaded(build("llama", "dms", "bf16")) for _ in range(2))
    train(engine, last=1)
    train(kept, last=1)
    compute = engine._gradients

    def broken(*given: Any) -> Any:
        result = compute(*given)
        (part,) = parts(engine)
        next(iter(part.model_param_group_index_map)).main_grad.view(-1)[0] = float("nan")
        return result

    monkeypatch.setattr(engine, "_gradients", broken)
    plan = StepPlan(step=1, stage_step=1, loss="lm")
    assert engine.train_step(plan, tiny.microbatches(0, 1, groups=2)).skipped
    assert_equal_states(engine, kept, rtol=0.0, atol=0.0)
    counts = [
        [group["step"] for group in parts(e)[0].optimizer.param_groups] for e in (engine, kept)
    ]
    assert counts[0] == counts[1]


def test_other_weights_replace_the_fp32_weights(build: Any, tmp_path: Path) -> None:
    engine, source = offloaded(build("llama", "dms", "bf16")), build("llama", "dms", "bf16")
    train(engine, last=1)
    plain(source)
    train(source, last=2)
    source.save_weights(tmp_path / "weights", {})
    engine.load(tmp_path / "weights", with_optimizer=False)
    for part in parts(engine):
        for parameter in part.model_param_group_index_map:
            master = compat.parameter_state(part, parameter)["param"]
            assert torch.equal(master, parameter.detach().float().view(-1))
    source.save(tmp_path / "step", {})
    engine.load(tmp_path / "step", with_optimizer=False)
    for mine, other in zip(states(engine), states(source), strict=True):
        assert torch.equal(mine["param"], other["param"].detach())


def test_a_reset_eviction_channel_is_zero_in_all_tensors_of_the_optimizer(build: Any) -> None:
    engine = offloaded(build("llama", "dms", "bf16"))
    engine.reset_eviction_channel()  # also before the state exists
    train(engine, last=2)
    engine.reset_eviction_channel()
    for parameter, rows in engine._channel_rows(engine.spec.channel):
        (part,) = parts(engine)
        for name in ("param", "exp_avg", "exp_avg_sq"):
            tensor = compat.parameter_state(part, parameter)[name].view_as(parameter)
            assert not tensor[rows].any()
            assert tensor.any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offload": True}, "optim.offload=true: needs a GPU and training runs on the CPU"),
        ({"state_dtype": "bf16"}, "optim.state_dtype=bf16: needs a GPU and training runs on"),
    ],
)
def test_a_cpu_refuses_options_of_the_gpu_in_one_line(
    build: Any, changes: dict[str, Any], words: str
) -> None:
    engine = build("llama", "dms")
    options = replace(engine._options, optim=replace(engine._options.optim, **changes))
    with pytest.raises(ModelError, match=words) as refused:
        McoreEngine(engine.architecture, engine._method.options, engine.view, options, None)
    assert len(str(refused.value).splitlines()) == 1
