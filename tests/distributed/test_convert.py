"""Weights and logits are unchanged after conversion through every layout and back.

By default one layout converts every family and another loads their checkpoints; the other layouts
convert one family each. DMS_FULL_MATRIX=1 takes every family through every layout.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from dms_train.families import FAMILIES
from dms_train.hf.config_json import from_hf_config
from dms_train.hf.json_files import read_config
from dms_train.hf.stored_tensors import to_stored
from dms_train.hf.weight_reader import WeightReader
from dms_train.mcore import groups
from dms_train.mcore.engine import McoreEngine, TrainEngineOptions
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.weights import RandomWeights
from dms_train.mcore.options import OptimOptions, ParallelOptions
from dms_train.method import decisions
from dms_train.method.noise import logistic_noise, sample_keys
from dms_train.method.plan import StepPlan
from dms_train.method.spec import PRESETS
from dms_train.method.visibility import align_to_keys
from tests.support import tiny
from tests.support.matrix import FULL_MATRIX
from tests.support.ranks import values_of_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
PROCESSES = 4
SAVED_IN = "tp2_pp2"
LAYOUTS: dict[str, dict[str, Any]] = {
    SAVED_IN: {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "tp1_pp1": {},
    "tp2_pp1": {"tensor_model_parallel_size": 2},
    "tp1_pp2": {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1},
    "tp2_cp2": {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
}
LOADED_IN = ("tp1_pp2", "tp2_pp1") if FULL_MATRIX else ("tp1_pp2",)
LENGTH = 160
VOCAB = 61
SEED, STEP = 7, 3
SPEC = PRESETS["dms"].override(window=4)


def families_of(layout: str) -> list[str]:
    """Families that a layout converts: all, or one that differs between layouts."""
    names = list(FAMILIES)
    if FULL_MATRIX or layout == SAVED_IN:
        return names
    return [names[2 * list(LAYOUTS).index(layout) % len(names)]]


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(8))


def parallel_options(family: str, layout: str) -> ParallelOptions:
    """Experts need sequence parallelism beside tensor parallelism."""
    options = ParallelOptions(**LAYOUTS[layout])
    shards = options.tensor_model_parallel_size > 1
    return replace(options, sequence_parallel=shards and FAMILIES[family].has_experts)


def build(model: Path, layout: str, view: ParallelView, source: Any) -> McoreEngine:
    options = TrainEngineOptions(
        parallel=parallel_options(model.name, layout),
        optim=OptimOptions(lr=1e-3),
        seed=SEED,
        trains=False,
    )
    return McoreEngine(from_hf_config(read_config(model)), SPEC, view, options, source)


def weights_of(engine: McoreEngine) -> dict[str, Tensor]:
    return dict(to_stored(engine.architecture, engine.hf_tensors()))


def keep_shares(engine: McoreEngine, view: ParallelView) -> dict[str, Tensor]:
    """log(1 - alpha) that this rank's kernels get, by layer, head and sample."""
    seen: dict[int, list[Tensor]] = {}
    for layer in engine._models[0].decoder.layers:
        layer.self_attention.core_attention.register_forward_pre_hook(
            lambda _, args, number=layer.layer_number: seen.setdefault(number, []).append(args[3])
        )
    engine.reset_eviction_channel()
    batches = tiny.microbatches(view.dp_rank, view.dp_size)
    plan = StepPlan(step=STEP, eviction="soft", channel_scale=0.0, loss="lm")
    engine.evaluate(plan, batches)
    shares = {}
    for number, kept in seen.items():
        for batch, log_keep in zip(batches, kept, strict=True):
            for row, sample in enumerate(batch.samples.tolist()):
                first = (view.tp_rank * view.cp_size + view.cp_rank) * log_keep.shape[1]
                for head, share in enumerate(log_keep[row], first):
                    shares[f"{number}.{head}.{sample}"] = share.clone()
    return shares


def run(models: Path, out: Path, layout: str) -> None:
    view = groups.start(ParallelOptions(**LAYOUTS[layout]), seed=1)
    for family in families_of(layout):
        engine = build(models / family, layout, view, WeightReader(models / family))
        weights, recording = weights_of(engine), engine.record(StepPlan(), tokens())
        if recording is not None:
            contents = {**weights, "logits": recording.logits}
            save_file(contents, out / f"{family}-{layout}.safetensors")
        if layout == SAVED_IN:
            engine.save_weights(out / f"{family}-checkpoint", {"family": family})
    engine = build(models / "llama", layout, view, WeightReader(models / "llama"))
    save_file(keep_shares(engine, view), out / f"shares-{layout}-{view.rank}.safetensors")
    for family in FAMILIES if layout in LOADED_IN else ():
        other = RandomWeights(from_hf_config(read_config(models / family)), 99, 0.2)
        engine = build(models / family, layout, view, other)
        engine.load(out / f"{family}-checkpoint", with_optimizer=False)
        loaded = weights_of(engine)
        if view.rank == 0:
            save_file(loaded, out / f"{family}-{layout}-loaded.safetensors")
    groups.stop(keep_process_group=True)


def work(models: Path, out: Path) -> None:
    for layout in LAYOUTS:
        run(models, out, layout)
    groups.stop()


COMMON = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "gemma3_text": {
        "query_pre_attn_scalar": 20,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "sliding_window": 9,
        "sliding_window_pattern": 2,
    },
    "glm4": {"head_dim": 12, "partial_rotary_factor": 2 / 3},
    "phi3": {"head_dim": 8, "partial_rotary_factor": 0.75},
    "olmo3": {
        "head_dim": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "sliding_window": 9,
    },
    "gpt_oss": {
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
        "sliding_window": 9,
    },
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_5_text": {
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "initializer_range": 0.1,  # rounding in float32 grows less
    },
    "qwen3_next": {
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "initializer_range": 0.1,  # rounding in float32 grows less
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
CASES = [(family, layout) for layout in LAYOUTS for family in families_of(layout)]


def random_model(family: str, **changes: Any) -> transformers.PreTrainedModel:
    """Every weight random, also those that start at zero or one."""
    described = FAMILIES[family]
    kind = getattr(transformers, described.config_class)
    values = {**described.fixed, **described.written}
    if described.always_has_head_dim:
        values["head_dim"] = 12
    values |= {**CHANGES.get(family, {}), **changes}
    torch.manual_seed(3)
    config = kind(**{**COMMON, **values})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(("bias", "sinks")):
            parameter.data += 0.3 * torch.randn(parameter.shape)
    return model


def logits(model: transformers.PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(tokens()[None]).logits[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("models")
    expected = {}
    for family in FAMILIES:
        model = random_model(family)
        model.save_pretrained(folder / family)
        expected[family] = logits(model)
    return folder, expected


@pytest.fixture(scope="module")
def results(
    models: tuple[Path, dict[str, Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("converted")
    values_of_ranks(work, PROCESSES, models[0], out)
    return out


def original(models: tuple[Path, dict[str, Tensor]], family: str) -> dict[str, Tensor]:
    return load_file(models[0] / family / "model.safetensors")


def test_the_models_have_the_features_of_their_names(
    models: tuple[Path, dict[str, Tensor]],
) -> None:
    assert "lm_head.weight" not in original(models, "llama")
    assert "lm_head.weight" in original(models, "qwen2")
    assert original(models, "qwen2")["model.layers.0.self_attn.q_proj.bias"].abs().min() > 0
    assert original(models, "qwen3")["model.layers.0.self_attn.q_norm.weight"].shape == (12,)
    plain = random_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert (logits(plain) - models[1]["llama"]).abs().max() > 0.01


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_weights_are_equal_bit_for_bit_after_conversion(
    models: tuple[Path, dict[str, Tensor]], results: Path, family: str, layout: str
) -> None:
    expected = original(models, family)
    got = load_file(results / f"{family}-{layout}.safetensors")
    got.pop("logits")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_an_untouched_model_computes_the_logits_of_transformers(
    models: tuple[Path, dict[str, Tensor]], results: Path, family: str, layout: str
) -> None:
    got = load_file(results / f"{family}-{layout}.safetensors")["logits"]
    expected = models[1][family]
    difference = (got - expected).abs().max().item()
    print(f"{family} {layout}: max |dlogit| {difference:.1e} of {expected.abs().max():.1f}")
    assert got.shape == expected.shape
    assert difference < 1e-4


@pytest.mark.parametrize("layout", LOADED_IN)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_one_layout_loads_bit_for_bit_in_another(
    models: tuple[Path, dict[str, Tensor]], results: Path, family: str, layout: str
) -> None:
    expected = original(models, family)
    got = load_file(results / f"{family}-{layout}-loaded.safetensors")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def expected_shares() -> dict[str, Tensor]:
    """log(1 - alpha) of zero eviction channels for every layer, head and sample, by key."""
    samples = torch.arange(8)
    keys = sample_keys(SEED, STEP, samples)
    shares = {}
    for layer in range(1, 5):
        noise = logistic_noise(keys, layer, tiny.LENGTH, 4, 0)
        eviction_channel = decisions.eviction_logits(torch.zeros(noise.shape), SPEC)
        _, log_keep, _ = decisions.relax(eviction_channel, noise, SPEC.tau)
        by_key = align_to_keys(log_keep.permute(1, 2, 0), SPEC, keep=0.0)
        for sample in samples.tolist():
            for head in range(4):
                shares[f"{layer}.{head}.{sample}"] = by_key[sample, head]
    return shares


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_relaxes_with_the_same_noise(results: Path, layout: str) -> None:
    got: dict[str, Tensor] = {}
    for rank in range(PROCESSES):
        mine = load_file(results / f"shares-{layout}-{rank}.safetensors")
        assert not got.keys() & mine.keys()
        got |= mine
    expected = expected_shares()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], share) for name, share in expected.items())
