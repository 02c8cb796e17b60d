"""AdamW on the CPU and moments in bf16: steps, memory of the GPU, and checkpoints that move."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dms_train.mcore import compat, groups, host_adam
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.host_adam import HostAdamW
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method.plan import LearningRate, StepPlan, StepResult
from dms_train.method.spec import PRESETS
from tests.support import tiny

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
needs_te = pytest.mark.skipif(not HAS_TE, reason="needs Transformer Engine")
STEPS, LENGTH, LR, DECAY = 3, 128, 1e-3, 0.05
SMALL = {"hidden_size": 128, "ffn_hidden_size": 256}
LARGE = {"hidden_size": 1024, "ffn_hidden_size": 4096, "vocab_size": 16384}  # 67 million weights
RATE = LearningRate(max_lr=LR, min_lr=LR, steps=9, warmup_steps=0, style="constant")
# of losses and weights: atomic sums of attention's gradient differ from run to run
LOSS, WEIGHT = {"fp32": 1e-4, "bf16": 5e-3}, {"fp32": 1e-5, "bf16": 8e-3}
STATES = ("param", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def view() -> Iterator[ParallelView]:
    yield groups.start(ParallelOptions(), seed=1)
    groups.stop()


def build(
    view: ParallelView,
    dtype: str = "bf16",
    sizes: dict[str, Any] = SMALL,
    graph: str = "never",
    **memory: Any,
) -> McoreEngine:
    architecture = tiny.architecture(
        "qwen3", num_layers=4, kv_channels=64, max_position_embeddings=LENGTH, **sizes
    )
    options = TrainEngineOptions(
        parallel=ParallelOptions(params_dtype=dtype, cuda_graph=graph, layers="local"),
        optim=OptimOptions(lr=LR, weight_decay=DECAY, **memory),
        seed=7,
    )
    spec = PRESETS["dms"].override(window=16)
    engine = McoreEngine(architecture, spec, view, options, RandomWeights(architecture, 1, 0.05))
    engine.begin_stage(RATE)
    return engine


def step(engine: McoreEngine, number: int) -> StepResult:
    plan = StepPlan(step=number, stage_step=number, loss="lm")
    result = engine.train_step(plan, [tiny.batch(number, length=LENGTH)])
    assert not result.skipped
    return result


def train(engine: McoreEngine, first: int = 0, last: int = STEPS) -> list[float]:
    return [step(engine, number).loss for number in range(first, last)]


def inner(engine: McoreEngine) -> Any:
    (part,) = compat.optimizer_parts(engine._optimizer)
    return part.optimizer


def states(engine: McoreEngine) -> list[dict[str, Tensor]]:
    (part,) = compat.optimizer_parts(engine._optimizer)
    return [compat.parameter_state(part, p) for p in part.model_param_group_index_map]


def copies(engine: McoreEngine) -> list[dict[str, Tensor]]:
    """Copies of the state of every parameter in host memory."""
    return [{name: s[name].detach().cpu().clone() for name in STATES} for s in states(engine)]


@pytest.mark.parametrize("graph", ["never", "always"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_steps_of_an_offloaded_optimizer_are_those_of_the_gpu(
    view: ParallelView, monkeypatch: pytest.MonkeyPatch, dtype: str, graph: str
) -> None:
    monkeypatch.setattr(host_adam, "HOST_PIECE", 5000)  # several pieces, and a remainder
    resident, offloaded = (
        build(view, dtype, graph=graph, offload=offload) for offload in (False, True)
    )
    assert isinstance(inner(offloaded), HostAdamW)
    assert train(offloaded) == pytest.approx(train(resident), rel=LOSS[dtype])
    pairs = zip(offloaded.hf_tensors(), resident.hf_tensors(), strict=True)
    for (name, weight), (_, expected) in pairs:
        # an update whose gradient is noise may have either sign
        apart = (weight - expected).float().norm() / expected.float().norm()
        assert apart < WEIGHT[dtype], name


def test_updates_on_the_host_are_those_of_torch_on_copies_in_float64(view: ParallelView) -> None:
    """The gradients are those that the engine's own passes left on the GPU."""
    engine = build(view, "fp32", offload=True)
    weights = {p: p.detach().cpu().double() for p in engine._models[0].parameters()}
    parameters = {p: torch.nn.Parameter(w) for p, w in weights.items()}
    # vectors do not decay, by megatron's rule
    decays = {p: DECAY if p.dim() > 1 else 0.0 for p in parameters}
    exact = torch.optim.AdamW(
        [{"params": [copy], "weight_decay": decays[p]} for p, copy in parameters.items()],
        lr=LR,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for number in range(STEPS):
        step(engine, number)
        for parameter, copy in parameters.items():
            copy.grad = parameter.main_grad.cpu().double()  # clipped in place
        exact.step()
    for parameter, copy in parameters.items():
        torch.testing.assert_close(
            parameter.detach().cpu(), copy.detach().float(), rtol=1e-5, atol=1e-6
        )


def allocated(view: ParallelView, **memory: Any) -> tuple[int, int]:
    """Return the bytes that an engine holds on the GPU after a step, and its parameters."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = build(view, sizes=LARGE, **memory)
    step(engine, 0)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    return held, sum(p.numel() for p in engine._models[0].parameters())


def test_an_offloaded_optimizer_holds_nothing_on_the_gpu(view: ParallelView) -> None:
    resident, parameters = allocated(view)
    offloaded, _ = allocated(view, offload=True)
    assert resident - offloaded == pytest.approx(12 * parameters, rel=0.1)
    # bf16 weights and fp32 gradients
    assert offloaded == pytest.approx(6 * parameters, rel=0.1)


def moves(names: tuple[dict[str, Any], ...]) -> Any:
    pairs = [(a, b) for a in names for b in names if a != b or a.get("offload")]
    return pytest.mark.parametrize(("wrote", "reads"), pairs)


def assert_goes_on(
    view: ParallelView, folder: Path, wrote: dict[str, Any], reads: dict[str, Any], moment: float
) -> None:
    """Save after two steps, load elsewhere, and compare the state and two further steps."""
    source, target = build(view, **wrote), build(view, **reads)
    train(source, last=2)
    source.save(folder / "step", {})
    saved = copies(source)
    train(target, first=5, last=6)  # a state that loading must replace
    target.load(folder / "step", with_optimizer=True)
    target.begin_stage(RATE)
    for mine, expected in zip(copies(target), saved, strict=True):
        assert torch.equal(mine["param"], expected["param"])
        for name in STATES[1:]:
            torch.testing.assert_close(mine[name], expected[name], rtol=moment, atol=0.0)
    expected_losses = train(source, first=2, last=4)
    assert train(target, first=2, last=4) == pytest.approx(expected_losses, rel=LOSS["bf16"])


@moves(({}, {"offload": True}))
def test_a_checkpoint_of_an_offloaded_optimizer_goes_on(
    view: ParallelView, tmp_path: Path, wrote: dict[str, Any], reads: dict[str, Any]
) -> None:
    assert_goes_on(view, tmp_path, wrote, reads, moment=0.0)


def test_steps_during_a_save_do_not_change_it(view: ParallelView, tmp_path: Path) -> None:
    engine = build(view, sizes=LARGE, offload=True)
    train(engine, last=1)
    saved = copies(engine)
    engine.save(tmp_path / "step", {}, wait=False)
    train(engine, first=1, last=3)
    engine.finish_save(wait=True)
    other = build(view, sizes=LARGE, offload=True)
    other.load(tmp_path / "step", with_optimizer=True)
    for mine, expected in zip(copies(other), saved, strict=True):
        assert all(torch.equal(mine[name], expected[name]) for name in STATES)


@needs_te
def test_moments_are_in_bf16(view: ParallelView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "MOMENTS_PIECE", 50_000)
    full, half = build(view), build(view, state_dtype="bf16")
    assert train(half) == pytest.approx(train(full), rel=1e-2)
    optimizer = inner(half)
    assert type(optimizer).__name__ == "FusedAdam"
    for entry in optimizer.state.values():
        assert entry["exp_avg"].dtype == entry["exp_avg_sq"].dtype == torch.bfloat16
        assert entry["master_param"].dtype == torch.float32
    assert {group["step"] for group in optimizer.param_groups} == {STEPS}
    for mine, exact in zip(copies(half), copies(full), strict=True):
        for name in STATES:
            apart = (mine[name] - exact[name]).norm() / exact[name].norm()
            assert apart < 5e-2, name
        # 24 bits of mantissa, of which bf16 has 8
        assert not torch.equal(mine["param"], mine["param"].bfloat16().float())


@needs_te
def test_moments_in_bf16_take_four_bytes_less(view: ParallelView) -> None:
    full, parameters = allocated(view)
    half, _ = allocated(view, state_dtype="bf16")
    assert full - half == pytest.approx(4 * parameters, rel=0.1)


@needs_te
@moves(({}, {"state_dtype": "bf16"}, {"offload": True}))
def test_a_checkpoint_of_bf16_moments_goes_on(
    view: ParallelView, tmp_path: Path, wrote: dict[str, Any], reads: dict[str, Any]
) -> None:
    assert_goes_on(view, tmp_path, wrote, reads, moment=2**-8)


@needs_te
def test_other_weights_replace_the_fp32_weights_of_fused_adam(view: ParallelView) -> None:
    engine = build(view, state_dtype="bf16")
    train(engine, last=1)
    engine.load_hf(RandomWeights(engine.architecture, 5, 0.05))
    (part,) = compat.optimizer_parts(engine._optimizer)
    for parameter in part.model_param_group_index_map:
        master = compat.parameter_state(part, parameter)["param"]
        assert torch.equal(master, parameter.detach().float().view(-1))


@pytest.mark.parametrize(
    "memory",
    [{"offload": True}, pytest.param({"state_dtype": "bf16"}, marks=needs_te)],
    ids=["offload", "bf16"],
)
def test_a_reset_eviction_channel_is_zero(view: ParallelView, memory: dict[str, Any]) -> None:
    engine = build(view, **memory)
    train(engine, last=2)
    engine.reset_eviction_channel()
    (part,) = compat.optimizer_parts(engine._optimizer)
    for parameter, rows in engine._channel_rows(engine.spec.channel):
        tensors = compat.parameter_state(part, parameter)
        for name in STATES:
            assert not tensors[name].view_as(parameter)[rows].any(), name
            assert tensors[name].any(), name
