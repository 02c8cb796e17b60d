"""Every parallel layout computes the loss and the gradients of DMC of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import parity_runs
from tests.support.matrix import FULL_MATRIX

BAR = 1e-5
RECOMPUTE = {"recompute_granularity": "full", "recompute_num_layers": 1}
TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"context_parallel_size": 2}),
    "selective": (1, {"recompute_granularity": "selective"}),
    "recompute_tp2_pp2_sp": (4, {**TP2_PP2, "sequence_parallel": True, **RECOMPUTE}),
}
PLAN = {"target_cr": 8.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "dmc": {"preset": "dmc", "family": "llama", "plan": PLAN},
    "dmc_c": {"preset": "dmc_c", "family": "qwen3", "plan": {**PLAN, "loss": "lm"}},
    "dmc_hardc": {"preset": "dmc_hardc", "family": "qwen2", "plan": PLAN},
    "layer": {"preset": "dmc", "family": "llama", "plan": PLAN, "spec": {"prior": "layer"}},
    "packed": {"preset": "dmc_c", "family": "llama", "plan": PLAN, "packed": True},
    "zeroing": {
        "preset": "dmc",
        "family": "llama",
        "plan": {"eviction": "none", "channel_scale": 0.5},
    },
}
CASES = [
    *(("tp2", variant) for variant in ("dmc", "dmc_hardc", "zeroing")),
    *(("recompute_tp2_pp2_sp", variant) for variant in ("dmc_c", "layer")),
    ("pp2", "dmc"),
    ("dp2", "dmc_hardc"),
    ("cp2", "layer"),
    ("cp2", "packed"),
    ("selective", "packed"),
]
if FULL_MATRIX:
    CASES = [(layout, variant) for layout in LAYOUTS for variant in VARIANTS]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs all cases: one launch per number of processes."""
    folder = tmp_path_factory.mktemp("parity")
    layouts = {"one": (1, {}), **LAYOUTS}
    for world in (1, 2, 4):
        cases = [
            {"name": f"{layout}-{variant}", "layout": options, **VARIANTS[variant]}
            for layout, (processes, options) in layouts.items()
            for variant in VARIANTS
            if processes == world and (layout == "one" or (layout, variant) in CASES)
        ]
        parity_runs.run(world, cases, folder, timeout=600)
    return folder


@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("layout", "variant"), CASES)
def test_layout_equals_one_process(results: Path, layout: str, variant: str) -> None:
    found = parity_runs.read(results, f"{layout}-{variant}")
    expected = parity_runs.read(results, f"one-{variant}")
    if variant != "zeroing":
        assert 0.3 < expected.totals["alpha"] < 0.7
        assert expected.totals["aux_loss"] > 0.05
    assert parity_runs.loss_difference(found, expected) < BAR
    assert parity_runs.largest_difference(found, expected) < BAR
