"""Two GPUs over NCCL compute the loss and the gradients of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import parity_runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(400),
]
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
OVERLAP = {**TP2, "sequence_parallel": True, "tp_comm_overlap": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": TP2,
    "tp2_sp": {**TP2, "sequence_parallel": True},
    "overlap_tp2_sp": OVERLAP,
    "pp2": PP2,
    "recompute_pp2": {**PP2, **FULL},
    "pp2_vp2": VP2,
    "recompute_pp2_vp2": {**VP2, **FULL},
    "mlp_tp2_sp": {**TP2, **MLP, "sequence_parallel": True},
    "overlap_mlp_tp2_sp": {**OVERLAP, **MLP},
    "mlp_uneven_pp2": {**PP2, **MLP, "num_layers_in_first_pipeline_stage": 3},
    "cp2": {"context_parallel_size": 2},
    "recompute_cp2": {"context_parallel_size": 2, **FULL},
    "dp2": {},
}
# Rounding of a bf16 step: 8 bits in every activation, and other orders of summation.
BARS = {"fp32": (1e-5, 1e-5), "bf16": (2e-3, 3e-2)}
# Heads large enough for the kernels of this GPU, and several of their tiles.
SIZES: dict[str, Any] = {
    "architecture": {
        "hidden_size": 256,
        "ffn_hidden_size": 384,
        "kv_channels": 64,
        "max_position_embeddings": 512,
    },
    "std": 0.05,
    "length": 320,
    "plan": {"target_cr": 8.0},
    "spec": {"window": 16},
}
# family, preset: the first shares its embeddings with the output layer, the second does not
MODELS = {"tied": ("llama", "dms"), "untied": ("qwen2", "dms_nvidia")}
CASES = [
    *((model, layout, "fp32") for model in MODELS for layout in LAYOUTS),
    *(
        (model, layout, "bf16")
        for model in MODELS
        for layout in ("tp2_sp", "overlap_tp2_sp", "pp2", "cp2", "dp2")
    ),
    ("untied", "recompute_pp2_vp2", "bf16"),
    ("untied", "mlp_uneven_pp2", "bf16"),
]


def describe(model: str, layout: str, dtype: str) -> dict[str, Any]:
    family, preset = MODELS[model]
    chosen = {**LAYOUTS.get(layout, {}), "params_dtype": dtype, "layers": "local"}
    name = f"{model}-{layout}-{dtype}"
    return {"name": name, "family": family, "preset": preset, "layout": chosen, **SIZES}


def run_all(folder: Path) -> Path:
    """One GPU first: it compiles the kernels for all."""
    ones = sorted({(model, "one", dtype) for model, _, dtype in CASES})
    parity_runs.run(1, [describe(*case) for case in ones], folder, timeout=200)
    parity_runs.run(2, [describe(*case) for case in CASES], folder, timeout=200)
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize(("model", "layout", "dtype"), CASES)
def test_two_gpus_equal_one(results: Path, model: str, layout: str, dtype: str) -> None:
    found = parity_runs.read(results, f"{model}-{layout}-{dtype}")
    expected = parity_runs.read(results, f"{model}-one-{dtype}")
    assert 0.2 < expected.totals["alpha"] < 0.8
    assert expected.totals["aux_loss"] > 0.05
    loss = parity_runs.loss_difference(found, expected)
    gradients = parity_runs.largest_distance(found, expected)
    element = parity_runs.largest_difference(found, expected)
    print(f"{layout} {model} {dtype}: loss {loss:.1e}, gradients {gradients:.1e} ({element:.1e})")
    loss_bar, bar = BARS[dtype]
    assert loss < loss_bar
    assert gradients < bar


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", BARS)
def test_overlap_changes_no_more_than_the_order_of_sums(
    results: Path, model: str, dtype: str
) -> None:
    found = parity_runs.read(results, f"{model}-overlap_tp2_sp-{dtype}")
    expected = parity_runs.read(results, f"{model}-tp2_sp-{dtype}")
    loss = parity_runs.loss_difference(found, expected)
    gradients = parity_runs.largest_distance(found, expected)
    print(f"overlap {model} {dtype}: loss {loss:.1e}, gradients {gradients:.1e}")
    loss_bar, bar = BARS[dtype]
    assert loss < loss_bar
    assert gradients < bar
