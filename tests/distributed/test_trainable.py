"""LoRA, eviction channels and attention on a frozen base: every layout trains the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dms_train.hf.architecture import Architecture
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.options import LoraOptions, OptimOptions, ParallelOptions, Trainable
from dms_train.method.plan import LearningRate, StepPlan
from dms_train.method.spec import PRESETS
from tests.support import tiny
from tests.support.matrix import FULL_MATRIX
from tests.support.ranks import run_ranks, values_of_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": TP2_SP,
    "tp2_overlap": {**TP2_SP, "tp_comm_overlap": True},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2, "recompute_granularity": "full"},
}
# of each, the first layout is what the others are compared with
CASES = [("lora", "qwen2", layout) for layout in LAYOUTS if layout != "tp2_overlap"]
CASES += [("lora", "llama", "dp2"), ("lora", "llama", "pp2")]  # one table on both stages
CASES += [("channel", "qwen2", layout) for layout in ("dp2", "tp2_sp", "cp2")]
CASES += [("attention", "qwen2", layout) for layout in ("dp2", "tp2_overlap", "pp2")]
# linear attention, which does not train, before each layer with attention
CASES += [("attention", "qwen3_5_text", layout) for layout in ("dp2", "pp2")]
if FULL_MATRIX:
    CASES += [("lora", "qwen2", "tp2_overlap"), ("channel", "qwen2", "tp2")]
    CASES += [("attention", "qwen2", "tp2_sp")]
SAVED, MERGED = "tp2", "dp2"
LORA = LoraOptions(rank=2, alpha=8.0)
RATE = LearningRate(max_lr=1e-2, min_lr=1e-2, steps=3, warmup_steps=0, style="constant")


def model(family: str) -> Architecture:
    """Two layers, or two pairs of layers of a hybrid."""
    return tiny.architecture(family, num_layers=4 if family in tiny.HYBRIDS else 2)


def build(view: ParallelView, train: str, architecture: Architecture, layout: str) -> McoreEngine:
    method = PRESETS["dms"].override(window=4, alpha_offset=0.5, alpha_scale=1.0)
    options = TrainEngineOptions(
        parallel=ParallelOptions(**LAYOUTS[layout]),
        # a large epsilon, because Adam amplifies rounding in small gradients
        optim=OptimOptions(lr=1e-2, adam_eps=1e-2),
        seed=7,
        trainable=Trainable(weights=train, lora=LORA),
    )
    source = tiny.SmallEvictionChannels(architecture, 1, method.channel)
    engine = McoreEngine(architecture, method, view, options, source)
    engine.attach_teacher(None)
    engine.reset_eviction_channel()
    engine.begin_stage(RATE)
    return engine


def train(engine: McoreEngine, first: int, last: int) -> None:
    for step in range(first, last):
        plan = StepPlan(
            step=step, stage_step=step, eviction="soft", channel_scale=0.0, target_cr=4.0
        )
        view = engine.view
        engine.train_step(plan, tiny.microbatches(view.dp_rank, view.dp_size))


def keep(engine: McoreEngine, path: Path) -> None:
    tensors = dict(engine.hf_tensors())
    if engine.view.rank == 0:
        save_file(tensors, path)


def record_twice(engine: McoreEngine, path: Path) -> None:
    """Record logits while updated weights are still gathered, and again when all are there."""
    plan = StepPlan(step=2, stage_step=2, eviction="none", channel_scale=0.0, target_cr=1.0)
    found = []
    for _ in range(2):
        found.append(engine.record(plan, torch.arange(tiny.LENGTH)))
        list(engine.hf_tensors())
    if found[0] is not None:
        save_file({"first": found[0].logits, "second": found[1].logits}, path)


def work(out: Path) -> None:
    for train_, family, layout in CASES:
        view = groups.start(ParallelOptions(**LAYOUTS[layout]), seed=1)
        engine = build(view, train_, model(family), layout)
        train(engine, 0, 2)
        if (train_, family, layout) == ("lora", "qwen2", SAVED):
            engine.save(out / "checkpoint", {})
        if (train_, family, layout) == ("lora", "qwen2", MERGED):
            record_twice(engine, out / "recorded")
        train(engine, 2, 3)
        if (train_, family, layout) == ("lora", "qwen2", MERGED):
            engine.save_weights(out / "weights", {})
        keep(engine, out / f"{train_}-{family}-{layout}")
        adapter = engine.adapter_tensors() if train_ != "attention" else None
        if adapter is not None:
            save_file(adapter.tensors, out / f"{train_}-{family}-{layout}.adapter")
        groups.stop(keep_process_group=True)
    for layout in ("dp2", "pp2"):
        view = groups.start(ParallelOptions(**LAYOUTS[layout]), seed=1)
        engine = build(view, "lora", model("qwen2"), layout)
        engine.load(out / "checkpoint", with_optimizer=True)
        train(engine, 2, 3)
        keep(engine, out / f"resumed-{layout}")
        groups.stop(keep_process_group=True)
    engine = build(groups.start(ParallelOptions(), seed=1), "all", model("qwen2"), "dp2")
    engine.load(out / "weights", with_optimizer=False)
    keep(engine, out / "weights_alone")
    groups.stop()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainable")
    values_of_ranks(work, 2, folder)
    return folder


def difference(found: Path, expected: Path) -> float:
    """The largest difference of two exports."""
    one, other = load_file(found), load_file(expected)
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in other)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_layouts_export_the_same_model(out: Path, case: tuple[str, str, str]) -> None:
    kind, family, layout = case
    assert difference(out / f"{kind}-{family}-{layout}", out / f"{kind}-{family}-dp2") < 2e-6
    a = model(family)
    source = tiny.SmallEvictionChannels(a, 1, PRESETS["dms"].channel)
    moved = {
        name.split(".")[-2]
        for name, tensor in load_file(out / f"{kind}-{family}-{layout}").items()
        if not torch.equal(tensor, source.get(name))
    }
    targets = {"q_proj", "k_proj", "v_proj", "o_proj"}
    targets |= {"gate_proj"} if a.described.output_gate else set()
    assert moved == ({"q_proj"} if kind == "channel" else targets)
    if kind == "attention":
        return
    adapter = load_file(out / f"{kind}-{family}-{layout}.adapter")
    for name, tensor in load_file(out / f"{kind}-{family}-{layout}").items():
        projection = f"base_model.model.{name.rpartition('.')[0]}"
        base, down = source.get(name), adapter.get(f"{projection}.lora_A.weight")
        if name.endswith("weight") and down is not None:
            base = base + LORA.scale * adapter[f"{projection}.lora_B.weight"] @ down
        if name.endswith("bias"):
            base = adapter.get(f"{projection}.base_layer.bias", base)
        torch.testing.assert_close(base, tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_a_checkpoint_continues_in_another_layout(out: Path, layout: str) -> None:
    assert difference(out / f"resumed-{layout}", out / f"lora-qwen2-{SAVED}") < 2e-6


def test_adapters_are_merged_with_gathered_weights(out: Path) -> None:
    """Two data-parallel ranks gather the weights that a step has updated when they are read."""
    assert difference(out / "weights_alone", out / f"lora-qwen2-{MERGED}") == 0
    recorded = load_file(out / "recorded")
    assert torch.equal(recorded["first"], recorded["second"])


def save_untrained_stage(out: Path) -> None:
    """Train and save a hybrid whose first stage has nothing but linear attention."""
    view = groups.start(ParallelOptions(**LAYOUTS["pp2"]), seed=1)
    engine = build(view, "attention", tiny.architecture("qwen3_5_text", num_layers=2), "pp2")
    train(engine, 0, 1)
    print("trained", flush=True)
    engine.save(out, {})


def test_a_stage_without_trained_weights_cannot_be_saved(tmp_path: Path) -> None:
    """`dms_train.planning.divide` refuses such a stage for this reason."""
    ended = run_ranks(save_untrained_stage, 2, tmp_path / "checkpoint")
    assert "trained" in ended.stdout
    assert ended.returncode
    assert "sharded_state" in ended.stderr
