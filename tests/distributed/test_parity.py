"""Every parallel layout computes the loss and the gradients of one process.

The full matrix (family x preset x layout x variant) runs with DMS_FULL_MATRIX=1. By default each
family has one preset and one variant. Every family except those that compute what others do runs in
one layout that shards everything, and every other layout runs one family or a few. A step has two
microbatches by default, and four in `LONGER` variants, which keep a pipeline busy and are two in
each data parallel copy.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from dms_train.families import FAMILIES
from tests.support import parity_runs, tiny
from tests.support.matrix import FULL_MATRIX

BAR = 1e-5
LINEAR_BAR = 1e-4  # of gradients with linear attention, see tests/unit/mcore/test_one_step.py
PRESETS = ("dms", "dms_nvidia", "dms_fastdms")
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_num_layers": 1}
SELECTIVE_MLP_TP2_SP = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "recompute_granularity": "selective",
    "recompute_modules": ["mlp", "core_attn"],
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp2_uneven": (
        2,
        {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1},
    ),
    "tp2_pp2_sp": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
    "dp2": (2, {}),
    "pp2_vp2": (
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "recompute": (1, FULL_RECOMPUTE),
    "recompute_tp2_pp2_sp": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
            **FULL_RECOMPUTE,
        },
    ),
    "selective": (1, {"recompute_granularity": "selective"}),
    "selective_mlp_tp2_sp": (2, SELECTIVE_MLP_TP2_SP),
    "selective_mlp_tp2_overlap": (2, {**SELECTIVE_MLP_TP2_SP, "tp_comm_overlap": True}),
    "recompute_units": (1, {"recompute_granularity": "full", "recompute_num_layers": 2}),
    "selective_tp2_pp2_vp2_sp": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
            "recompute_granularity": "selective",
        },
    ),
}
CP2 = {"context_parallel_size": 2}
RECOMPUTE_CP2_TP2_SP = {
    **CP2,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    **FULL_RECOMPUTE,
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2_ep2": (4, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    "cp2_ep2": (2, {**CP2, "expert_model_parallel_size": 2}),
}
CONTEXT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, CP2),
    "cp4": (4, {"context_parallel_size": 4}),
    "dp2_cp2": (4, CP2),
    "cp2_tp2": (4, {**CP2, "tensor_model_parallel_size": 2}),
    "recompute_cp2_tp2_sp": (4, RECOMPUTE_CP2_TP2_SP),
    "recompute_cp2_tp2_overlap": (4, {**RECOMPUTE_CP2_TP2_SP, "tp_comm_overlap": True}),
    "selective_cp2_pp2_vp2": (
        4,
        {
            **CP2,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "recompute_granularity": "selective",
        },
    ),
}
# They divide eight KV heads, which the variant `eight_heads` has.
EIGHT_RANK_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp8": (8, {"context_parallel_size": 8}),
    "recompute_cp4_tp2_sp": (
        8,
        {
            "context_parallel_size": 4,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            **FULL_RECOMPUTE,
        },
    ),
    "selective_cp4_pp2_vp2": (
        8,
        {
            "context_parallel_size": 4,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "recompute_granularity": "selective",
        },
    ),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "retrofit": {"plan": {"target_cr": 8.0}},
    "immediate_sum": {
        "plan": {"target_cr": 8.0},
        "spec": {"eviction": "immediate", "aux_form": "sum"},
        "loss": {"kl_direction": "student_teacher"},
    },
    "lm": {"plan": {"target_cr": 8.0, "loss": "lm"}},
    # the teacher of one process stays on its device
    "mixed": {"plan": {"target_cr": 8.0, "loss": "mixed"}, "offload": True},
    "zeroing": {"plan": {"eviction": "none", "channel_scale": 0.5}},
    "packed": {"plan": {"target_cr": 8.0}, "packed": True},
    # as microbatches that are replayed as graphs, in several processes
    "one_by_one": {"plan": {"target_cr": 8.0}, "one_by_one": True},
    # two layers evict more than their targets already
    "layer_targets": {
        "plan": {"target_cr": 8.0, "layer_weights": [0.2, 1.1, 0.4, 1.1]},
        "packed": True,
    },
}
LONGER = ("zeroing", "one_by_one", "layer_targets")
EIGHT_HEADS = {
    "plan": {"target_cr": 8.0},
    "packed": True,
    "architecture": {"num_attention_heads": 16, "num_query_groups": 8},
}
EIGHT_RANK_CASES = [
    ("llama", "dms", layout, "eight_heads")
    for layout in EIGHT_RANK_LAYOUTS
    if FULL_MATRIX or layout == "cp8"
]
# Default cases of the context-parallel layouts.
CONTEXT_CASES = [
    ("qwen3", "dms_nvidia", "cp2", "immediate_sum"),
    ("llama", "dms", "cp2", "packed"),
    ("qwen3_moe", "dms", "cp2_ep2", "retrofit"),
    ("smollm3", "dms", "cp4", "packed"),
    ("llama", "dms", "recompute_cp2_tp2_overlap", "packed"),
    ("llama", "dms", "dp2_cp2", "packed"),
    ("gemma3_text", "dms", "cp2", "packed"),
    ("olmo3", "dms_fastdms", "cp2_tp2", "packed"),
    ("gpt_oss", "dms", "cp2_tp2", "packed"),
    ("qwen3_5_text", "dms", "cp2_tp2", "packed"),
]
LAYER_TARGET_CASES = [
    ("llama", "dms", layout, "layer_targets") for layout in ("tp2_pp2_sp", "selective_cp2_pp2_vp2")
]
ONE_BY_ONE_CASES = [("llama", "dms", "dp2", "one_by_one")]
# By default families run in this layout, which shards in every way; these run in others only.
WHOLE_LAYOUT = "selective_tp2_pp2_vp2_sp"
IN_OTHERS = ("llama", "mistral", "phi3")


def _cases() -> list[tuple[str, str, str, str]]:
    """(family, preset, layout, variant); by default a family has one preset and one variant."""
    if FULL_MATRIX:
        mixtures = [name for name, family in FAMILIES.items() if family.has_experts]
        layouts = [*LAYOUTS, *CONTEXT_LAYOUTS]
        mixed = itertools.product(mixtures, PRESETS, EXPERT_LAYOUTS, VARIANTS)
        whole = itertools.product(FAMILIES, PRESETS, layouts, VARIANTS)
        return [*whole, *mixed, *EIGHT_RANK_CASES]
    families = list(FAMILIES)
    chosen = [(family, WHOLE_LAYOUT) for family in families if family not in IN_OTHERS]
    others = [layout for layout in LAYOUTS if layout not in (WHOLE_LAYOUT, "tp2_pp2_sp")]
    chosen += zip(itertools.cycle(families), others, strict=False)
    cases = [
        (family, PRESETS[n % len(PRESETS)], layout, _variant(n))
        for family, layout in chosen
        for n in [families.index(family)]
    ]
    of_experts = [(name, PRESETS[0], "tp2_ep2", "retrofit") for name in ("gpt_oss", "qwen3_next")]
    more = [*EIGHT_RANK_CASES, *LAYER_TARGET_CASES, *ONE_BY_ONE_CASES]
    return [*of_experts, *CONTEXT_CASES, *more, *cases]


def _variant(number: int) -> str:
    """Variant of a family by its number; families that never evict have other cases too."""
    names = [name for name in VARIANTS if name not in ("layer_targets", "one_by_one")]
    return names[(number + number // len(names) + 1) % len(names)]


CASES = _cases()
ALL_LAYOUTS = LAYOUTS | EXPERT_LAYOUTS | CONTEXT_LAYOUTS | EIGHT_RANK_LAYOUTS


def _describe(family: str, preset: str, layout: str, variant: str) -> dict[str, Any]:
    options = ALL_LAYOUTS[layout][1] if layout != "one" else {}
    if FAMILIES[family].has_experts and "tensor_model_parallel_size" in options:
        options = {**options, "sequence_parallel": True}  # experts need it
    name = f"{family}-{preset}-{layout}-{variant}"
    return {
        "name": name,
        "family": family,
        "preset": preset,
        "layout": options,
        "microbatches": 4 if FULL_MATRIX or variant in LONGER else 2,
        **(EIGHT_HEADS if variant == "eight_heads" else VARIANTS[variant]),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs all cases: one launch per number of processes."""
    folder = tmp_path_factory.mktemp("parity")
    by_world: dict[int, list[dict[str, Any]]] = {}
    for family, preset, layout, variant in CASES:
        by_world.setdefault(ALL_LAYOUTS[layout][0], []).append(
            _describe(family, preset, layout, variant)
        )
    for family, preset, variant in sorted({(f, p, v) for f, p, _, v in CASES}):
        by_world.setdefault(1, []).append(_describe(family, preset, "one", variant))
    for world, cases in by_world.items():
        parity_runs.run(world, cases, folder, timeout=1500)
    return folder


@pytest.mark.dist
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "preset", "layout", "variant"), CASES)
def test_layout_equals_one_process(
    results: Path, family: str, preset: str, layout: str, variant: str
) -> None:
    found = parity_runs.read(results, f"{family}-{preset}-{layout}-{variant}")
    expected = parity_runs.read(results, f"{family}-{preset}-one-{variant}")
    if variant != "zeroing":
        assert 0.3 < expected.totals["alpha"] < 0.7
        assert expected.totals["aux_loss"] > 0.05
    terms = ("kl", "next_token") if variant == "mixed" else ()
    for name in terms:
        assert found.totals[name] == pytest.approx(expected.totals[name], rel=BAR), name
    worst_loss = parity_runs.loss_difference(found, expected)
    worst = parity_runs.largest_difference(found, expected)
    print(f"{layout} {family} {preset} {variant}: loss {worst_loss:.1e}, gradients {worst:.1e}")
    assert worst_loss < BAR
    assert worst < (LINEAR_BAR if family in tiny.HYBRIDS else BAR)
