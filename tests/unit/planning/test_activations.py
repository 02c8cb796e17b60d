"""Bytes that the plan counts are those that a real step of the engine holds, in many layouts."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from dms_train.families import FAMILIES
from dms_train.mcore.options import ParallelOptions, Trainable
from dms_train.method.spec import PRESETS
from dms_train.planning.activations import Microbatch, layer, linear_layer
from dms_train.planning.memory import MemoryEstimate, of_stage
from dms_train.planning.pipeline_stage import PipelineStage
from tests.support import configs, launch
from tests.support.matrix import FULL_MATRIX
from tests.support.plan_worker import SIZES

pytestmark = pytest.mark.timeout(360)
TP, PP, VP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
BF16: dict[str, Any] = {"params_dtype": "bf16"}
CP2: dict[str, Any] = {"context_parallel_size": 2}
SP: dict[str, Any] = {TP: 2, "sequence_parallel": True}
MLP: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
FULL: dict[str, Any] = {"recompute_granularity": "full"}


def case(
    *layouts: dict[str, Any],
    stage: int = 0,
    family: str = "qwen2",
    kinds: str = "lf",
    **changes: Any,
) -> dict[str, Any]:
    """One rank of a layout."""
    parallel = {**BF16}
    for layout in layouts:
        parallel |= layout
    pipeline = parallel.get(PP, 1) > 1
    values = {
        "method": "dms",
        "samples": 1,
        "length": 512,
        "microbatches": 4 if pipeline else 1,
        "distills": True,
        "train": "all",
    }
    architecture = {
        "kinds": kinds,
        "family": family,
        "tie_word_embeddings": family == "llama",
        "vocab_size": 256,
        # what a step holds for a moment is more of a few linear layers
        "num_layers": 8 if pipeline or family in ("qwen3_5_text", "qwen3_next") else 4,
    }
    return {
        **values,
        **changes,
        "parallel": parallel,
        "stage": stage,
        "architecture": architecture,
    }


CASES = {
    "one": case(microbatches=2),
    "one_fp32": case({"params_dtype": "fp32"}, samples=2),
    "llama": case(family="llama", samples=2),
    "qwen3": case(family="qwen3", length=640),
    "qwen3_moe": case(family="qwen3_moe"),
    "qwen3_moe_full": case(FULL, family="qwen3_moe"),
    "gpt_oss": case(family="gpt_oss"),
    "gpt_oss_attention_tp2_sp": case(SP, family="gpt_oss", train="attention"),
    "qwen3_5": case(family="qwen3_5_text"),
    "qwen3_5_full_first": case(family="qwen3_5_text", kinds="fl", samples=2),
    "qwen3_5_pp2_tp2_sp": case({PP: 2}, SP, family="qwen3_5_text", kinds="lllf", stage=1),
    "qwen3_5_full_recompute": case(FULL, family="qwen3_5_text"),
    "qwen3_5_cp2_mlp": case(CP2, MLP, family="qwen3_5_text", kinds="fl"),
    "qwen3_5_attention": case(family="qwen3_5_text", kinds="fl", train="attention"),
    "qwen3_5_lora_tp2": case({TP: 2}, family="qwen3_5_text", kinds="fl", train="lora"),
    "qwen3_next": case(family="qwen3_next", kinds="fl"),
    "qwen3_next_fp32": case({"params_dtype": "fp32"}, family="qwen3_next", kinds="fl"),
    "qwen3_next_attention_tp2_sp": case(SP, family="qwen3_next", kinds="fl", train="attention"),
    "lm": case(distills=False),
    "selective": case({"recompute_granularity": "selective"}),
    "mlp": case(MLP),
    "mlp_lm_qwen3": case(MLP, family="qwen3", distills=False),
    "mlp_core_attn": case({**MLP, "recompute_modules": ["core_attn", "mlp"]}),
    "tp2_sp_mlp": case(SP, MLP),
    "full": case(FULL),
    "full_units": case(FULL, {"recompute_num_layers": 2}, distills=False),
    "tp2": case({TP: 2}),
    "tp2_sp": case(SP),
    "tp2_sp_full": case(SP, FULL),
    "cp2": case(CP2, samples=2),
    "cp2_selective_qwen3": case(CP2, {"recompute_granularity": "selective"}, family="qwen3"),
    "cp2_full": case(CP2, FULL),
    "cp2_lora": case(CP2, train="lora"),
    "pp2_first": case({PP: 2}),
    "pp2_last": case({PP: 2}, stage=1),
    "pp4_second": case({PP: 4}, stage=1, microbatches=4),
    "pp2_vp2_first": case({PP: 2, VP: 2}),
    "pp2_vp2_last": case({PP: 2, VP: 2}, stage=1),
    "pp2_uneven_last": case({PP: 2, FIRST: 5}, stage=1),
    "pp3_vp2_uneven_first": case({PP: 3, VP: 2, FIRST: 4, LAST: 2}, microbatches=6),
    "pp2_vp4_full": case({PP: 2, VP: 4}, FULL),
    "pp2_tp2_sp_full": case({PP: 2}, SP, FULL, stage=1),
    "attention": case(train="attention", microbatches=2),
    "attention_tp2_sp": case(SP, train="attention"),
    "channel": case(train="channel"),
    "lora": case(train="lora", microbatches=2),
    "lora_tp2_sp_full": case(SP, FULL, train="lora"),
    "lora_tp2_sp": case(SP, train="lora"),
    "lora_pp2_llama": case({PP: 2}, train="lora", family="llama", stage=1),
    "lora_mlp": case(MLP, train="lora"),
    "lora_qwen3_moe": case(train="lora", family="qwen3_moe"),
    "lora_qwen3_moe_tp2_sp": case(SP, train="lora", family="qwen3_moe"),
    "lora_dmc": case(train="lora", method="dmc"),
    "dmc": case(method="dmc"),
    "dmc_llama": case(method="dmc", family="llama", samples=2),
    "dmc_qwen3": case(method="dmc", family="qwen3", length=640),
    "dmc_selective": case({"recompute_granularity": "selective"}, method="dmc"),
    "dmc_pp2_tp2_sp_full": case({PP: 2}, SP, FULL, method="dmc", stage=1),
}
# By default not those whose parts other cases have too, in other combinations.
COMBINATIONS = (
    *("qwen3_moe_full", "gpt_oss_attention_tp2_sp", "qwen3_5_full_first", "qwen3_5_attention"),
    *("qwen3_5_full_recompute", "qwen3_next", "qwen3_next_fp32", "lm", "mlp", "tp2_sp_full"),
    *("cp2_full", "pp2_last", "pp2_vp2_last", "attention_tp2_sp", "lora_tp2_sp", "lora_mlp"),
    *("lora_qwen3_moe", "dmc_llama", "dmc_selective", "tp2_sp_mlp", "cp2_selective_qwen3"),
    *("dmc_qwen3", "lora_pp2_llama"),
)
if not FULL_MATRIX:
    CASES = {name: given for name, given in CASES.items() if name not in COMBINATIONS}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    folder = tmp_path_factory.mktemp("plan")
    given, found = folder / "cases.json", folder / "found.json"
    given.write_text(json.dumps(CASES))
    launch.checked(launch.module("tests.support.plan_worker", str(given), str(found)))
    return json.loads(found.read_text())


def stage(given: dict[str, Any], **parallel: Any) -> PipelineStage:
    microbatch = Microbatch(
        architecture=configs.architecture(**SIZES, **given["architecture"]),
        method=PRESETS[given["method"]],
        parallel=ParallelOptions(**{**given["parallel"], **parallel}),
        samples=given["samples"],
        length=given["length"],
        distills=given["distills"],
        fused=False,
        trainable=Trainable(weights=given["train"]),
        shares=given["train"] != "all",
    )
    return PipelineStage(
        microbatch=microbatch,
        rank=given["stage"],
        copies=16,  # the update is no part of the step that is measured
        microbatches=given["microbatches"],
    )


def varying(memory: MemoryEstimate) -> int:
    return memory.activations + memory.logits + memory.workspace


@pytest.mark.parametrize("name", CASES)
def test_a_layer_keeps_what_the_plan_counts(measured, name):
    microbatch = stage(CASES[name]).microbatch
    granularity = microbatch.parallel.recompute_granularity
    recompute = granularity if granularity == "selective" else None
    # with experts a few bytes of a token depend on how many tokens an expert has
    bar = 1e-3 if microbatch.architecture.experts else 0.0
    first = microbatch.architecture.attention_layers[0]
    counted = (linear_layer if first.linear else layer)(microbatch, recompute)
    assert measured[name]["layer"] == pytest.approx(counted, rel=bar)


@pytest.mark.parametrize("name", CASES)
def test_a_step_holds_what_the_plan_counts(measured, name):
    counted = varying(of_stage(stage(CASES[name])))
    assert counted == pytest.approx(measured[name]["step"], rel=0.1)


@pytest.mark.parametrize("name", CASES)
def test_the_model_holds_what_the_plan_counts(measured, name):
    given = stage(CASES[name])
    memory = of_stage(given)
    # the moments of Adam come with its first update
    masters = given.trained * 4 // given.microbatch.cp if given.microbatch.width == 2 else 0
    counted = memory.weights + memory.gradients + memory.teacher + masters
    assert measured[name]["fixed"] == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("name", CASES)
def test_recomputing_more_never_keeps_more(name):
    kept = [
        of_stage(stage(CASES[name], recompute_granularity=granularity)).activations
        for granularity in (None, "selective", "full")
    ]
    assert all(more >= less for more, less in pairwise(kept))


@pytest.mark.parametrize("recompute", [None, "selective"])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_never_keep_more_than_plain_operations(family, recompute):
    plain = stage(case(family=family)).microbatch
    values = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
    fused = Microbatch(**{**values, "fused": True})
    assert layer(fused, recompute) < layer(plain, recompute)


def test_later_stages_keep_fewer_microbatches():
    given = {**case({PP: 4}), "microbatches": 8}
    kept = [of_stage(stage({**given, "stage": rank})).activations for rank in range(4)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] / kept[3] == pytest.approx(4, rel=0.1)
