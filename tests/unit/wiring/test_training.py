"""Every option of `dms-train` is read back where it acts: in the engine, the loop and the data."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file

from dms_train.app import inputs, run_folder
from dms_train.config.schema import RunConfig
from dms_train.families import LayerAttention
from dms_train.hf.formats import read_format
from dms_train.hf.rope import RopeScaling
from dms_train.mcore import compat
from dms_train.mcore.errors import CheckpointError
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model.offload import OffloadedTeacher
from dms_train.mcore.model.sharing import SharedTeacher
from dms_train.mcore.model.weights import RandomWeights
from dms_train.method.dmc.attention import DMCLayer
from dms_train.method.dms.attention import DMSLayer
from dms_train.method.spec import PRESETS
from dms_train.training.state import TrainState
from tests.support import refusals
from tests.support.experts import experts_of
from tests.support.plain_delta import sizes_of
from tests.support.wiring import Assets, Built, Wire, leaves, missing_tests, option, uncovered
from tests.support.wiring_reads import (
    EMBEDDING,
    adam,
    blend,
    documents,
    embedding,
    expected_noise,
    export_state,
    exported,
    exported_dense,
    exported_positions,
    found_model,
    frequencies,
    graph_refusal,
    kept,
    layers,
    llama3_frequency,
    loaded,
    lora_scale,
    lora_up,
    loss,
    losses,
    max_lr,
    megatron,
    mlp,
    noise,
    other_embedding,
    patience,
    plans,
    rate,
    rope_refusal,
    rows,
    saves,
    second_corpus,
    sinks,
    slowest,
    slowest_of_yarn,
    spec,
    stages,
    tokens,
    trained,
    training,
    weights,
)

# read back in test_evaluation.py
EVALUATED = ("stage.validate_export.", "stage.run_tasks.")
SCRATCH = {
    "model.path": None,
    "model.architecture": asdict(refusals.architecture()),
    "stage.run": ["pretrain"],
}
DMC = {"method": asdict(PRESETS["dmc"])}
TRIM_KV = {"method": asdict(PRESETS["trim_kv"]), "optim.weight_decay": 0.0}
FASTDMS = {"method": {**asdict(PRESETS["dms_fastdms"]), "window": 4}}
NVIDIA = {
    **SCRATCH,
    "model.architecture": {**SCRATCH["model.architecture"], "family": "qwen3"},
    "method": {**asdict(PRESETS["dms_nvidia"]), "window": 1024},
}
EXPERTS = {
    **SCRATCH,
    "model.architecture": asdict(
        refusals.architecture(family="qwen3_moe", experts=experts_of("qwen3_moe"))
    ),
}
LAYERS = (LayerAttention(rotary_base=None, linear=True), LayerAttention(rotary_base=1e4))
HYBRID, HYBRID_EXPERTS = (
    {
        **SCRATCH,
        "model.architecture": asdict(
            refusals.architecture(
                family=family, linear=sizes_of(family), layers=LAYERS, experts=experts_of(family)
            )
        ),
    }
    for family in ("qwen3_5_text", "qwen3_next")
)
LORA = {"method.train": "lora", "lora": {}}
GEMMA = {**SCRATCH, "model.architecture.family": "gemma3_text"}
YARN = RopeScaling(rope_type="yarn", factor=8.0)
OLMO = {
    **SCRATCH,
    "model.architecture.family": "olmo3",
    "model.architecture.rope_scaling": asdict(YARN),
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# without the one rule that Megatron knows a model is refused, with the rule in the message
SCALED = {"model.architecture.rope_scaling": {**SCALING, "high_freq_factor": 3.0}}


EVERY_STEP = {"run.save_interval": 1, "stage.hold.steps": 6}
PRETRAIN = {"stage.run": ["pretrain"], "stage.pretrain.steps": 3}


def weights_at_half(built: Built) -> object:
    """Weights of layers if the first evicts 1/2 and all together 2/3."""
    others = built.engine.architecture.num_layers - 1
    return pytest.approx([3 / 4, *[1 + 1 / 4 / others] * others])


WIRES: dict[str, Wire] = {
    "model.path": Wire(loaded, embedding, other_embedding),
    "model.architecture.num_layers": Wire(
        3, lambda b: len([n for n in weights(b) if "q_proj" in n]), others=SCRATCH
    ),
    "model.architecture.family": Wire(
        "qwen2", lambda b: any("q_proj.bias" in name for name in weights(b)), True, SCRATCH
    ),
    "model.architecture.hidden_size": Wire(64, rows("norm.weight"), others=SCRATCH),
    "model.architecture.ffn_hidden_size": Wire(
        80, rows("layers.0.mlp.up_proj.weight"), others=SCRATCH
    ),
    "model.architecture.num_attention_heads": Wire(
        8, rows("layers.0.self_attn.q_proj.weight"), 64, SCRATCH
    ),
    "model.architecture.num_query_groups": Wire(
        4, rows("layers.0.self_attn.k_proj.weight"), 32, SCRATCH
    ),
    "model.architecture.kv_channels": Wire(
        16, rows("layers.0.self_attn.v_proj.weight"), 32, SCRATCH
    ),
    "model.architecture.vocab_size": Wire(70, rows("embed_tokens.weight"), others=SCRATCH),
    "model.architecture.max_position_embeddings": Wire(96, exported_positions, others=SCRATCH),
    "model.architecture.rotary_base": Wire(
        500.0, lambda b: round(float(frequencies(b)[1]) ** -4), 500, SCRATCH
    ),
    "model.architecture.layernorm_epsilon": Wire(
        1e-3, lambda b: b.engine._models[0].decoder.final_layernorm.eps, others=SCRATCH
    ),
    "model.architecture.tie_word_embeddings": Wire(
        False, lambda b: "lm_head.weight" in weights(b), True, SCRATCH
    ),
    "model.architecture.layers": Wire(
        [{"rotary_base": None}] * 2,
        lambda b: [rope.base for rope in b.engine._models[0]._layer_ropes],
        [None],
        {**SCRATCH, "model.architecture.family": "smollm3"},
    ),
    "model.architecture.experts.count": Wire(
        6, lambda b: len(mlp(b).experts.local_experts), others=EXPERTS
    ),
    "model.architecture.experts.topk": Wire(3, lambda b: mlp(b).router.topk, others=EXPERTS),
    "model.architecture.experts.ffn_hidden_size": Wire(
        40, rows("layers.0.mlp.experts.0.up_proj.weight"), others=EXPERTS
    ),
    "model.architecture.experts.normalize": Wire(
        False, lambda b: not mlp(b).config.moe_router_pre_softmax, others=EXPERTS
    ),
    "model.architecture.experts.shared_ffn_hidden_size": Wire(
        28, rows("layers.0.mlp.shared_expert.up_proj.weight"), others=HYBRID_EXPERTS
    ),
    "model.architecture.linear.key_heads": Wire(
        1, rows("layers.0.linear_attn.in_proj_q.weight"), 6, HYBRID
    ),
    "model.architecture.linear.value_heads": Wire(
        2, rows("layers.0.linear_attn.A_log"), others=HYBRID
    ),
    "model.architecture.linear.key_channels": Wire(
        8, rows("layers.0.linear_attn.in_proj_q.weight"), 2 * 8, HYBRID
    ),
    "model.architecture.linear.value_channels": Wire(
        12, rows("layers.0.linear_attn.norm.weight"), others=HYBRID
    ),
    "model.architecture.linear.taps": Wire(
        3,
        lambda b: weights(b)["model.layers.0.linear_attn.conv1d_q.weight"].shape[-1],
        others=HYBRID,
    ),
    "model.architecture.rope_scaling.factor": Wire(
        4.0,
        slowest,
        lambda b: pytest.approx(1 / llama3_frequency(10000.0**-0.75, 4.0)),
        {**SCRATCH, "model.architecture.rope_scaling": {**SCALING, "factor": 8.0}},
    ),
    "model.architecture.rope_scaling.low_freq_factor": Wire(
        2.0, rope_refusal, "(2.0, 3.0, 8192)", {**SCRATCH, **SCALED}
    ),
    "model.architecture.rope_scaling.high_freq_factor": Wire(
        5.0, rope_refusal, "(1.0, 5.0, 8192)", {**SCRATCH, **SCALED}
    ),
    "model.architecture.rope_scaling.original_max_position_embeddings": Wire(
        4096, rope_refusal, "(1.0, 3.0, 4096)", {**SCRATCH, **SCALED}
    ),
    "model.architecture.rope_scaling.rope_type": Wire(
        "linear",
        rope_refusal,
        "",
        {**SCRATCH, **SCALED},
    ),
    "model.architecture.rope_scaling.beta_fast": Wire(
        500.0, slowest, pytest.approx(slowest_of_yarn(replace(YARN, beta_fast=500.0))), OLMO
    ),
    "model.architecture.rope_scaling.beta_slow": Wire(
        0.01, slowest, pytest.approx(slowest_of_yarn(replace(YARN, beta_slow=0.01))), OLMO
    ),
    "model.architecture.rope_scaling.truncate": Wire(
        False, slowest, pytest.approx(slowest_of_yarn(replace(YARN, truncate=False))), OLMO
    ),
    "model.architecture.rope_scaling.attention_factor": Wire(
        1.5,
        lambda b: b.engine._models[0].decoder.layers[0].self_attention.core_attention.scale,
        pytest.approx(1.5**2 * 8**-0.5),
        OLMO,
    ),
    "model.architecture.query_scalar": Wire(
        16,
        lambda b: b.engine._models[0].decoder.layers[0].self_attention.core_attention.scale,
        0.25,
        GEMMA,
    ),
    "model.architecture.partial_rotary_factor": Wire(
        0.5,
        lambda b: len(frequencies(b)),
        2,
        {**SCRATCH, "model.architecture.family": "phi3"},
    ),
    "model.revision": Wire("two", found_model, "b" * 40, {"model.path": "me/tiny"}),
    "model.local_files_only": Wire(False, found_model, "the hub", {"model.path": "me/absent"}),
    "model.max_position_embeddings": Wire(96, exported_positions),
    "model.tokenizer": Wire(
        lambda assets: str(assets.model),
        lambda b: (exported_dense(b) / "tokenizer.json").is_file(),
        True,
        SCRATCH,
    ),
    "model.init_std": Wire(
        0.5, lambda b: round(float(weights(b)[EMBEDDING].std()), 1), others=SCRATCH
    ),
    **{
        f"method.{name}": Wire(value, spec(name))
        for name, value in (
            ("channel", -1),
            ("alpha_scale", 50.0),
            ("alpha_offset", 4.0),
            ("window", 6),
            ("clear_after_rope", True),
            ("tau", 0.5),
            ("decision_shift", 0),
            ("eviction", "immediate"),
        )
    },
    **{
        f"method.{name}": Wire(value, spec(name), others=DMC)
        for name, value in (
            ("merge_window", 4),
            ("importance", "uniform"),
            ("importance_offset", 2.0),
            ("heads", "shared"),
        )
    },
    "method.train": Wire("attention", trained, {"linear_qkv", "linear_proj"}),
    "lora.rank": Wire(3, lambda b: lora_up(b)["o"][1], others=LORA),
    "lora.alpha": Wire(8.0, lora_scale, 0.5, LORA),
    "lora.targets": Wire(["q", "o"], lambda b: set(lora_up(b)), {"q", "o"}, LORA),
    "method.budget": Wire(64, spec("budget"), others=TRIM_KV),
    "method.capacity_weight": Wire(0.5, training("capacity_weight"), others=TRIM_KV),
    "method.alpha_in_loss": Wire("hard_st", training("alpha_in_loss")),
    "method.aux_form": Wire("sum", training("aux_form")),
    "method.consistency": Wire(1.0, training("consistency"), others=DMC),
    "method.prior": Wire("layer", training("prior"), others=DMC),
    "loss.kl_direction": Wire("student_teacher", loss("kl_direction")),
    "loss.kl_temperature": Wire(2.0, loss("kl_temperature")),
    "method.preset": Wire("dms_nvidia", spec("preset"), others={"stage.run": ["zero_neuron"]}),
    "stage.run": Wire(["zero_neuron"], lambda b: list(stages(b))),
    "stage.pretrain.steps": Wire(5, lambda b: len(plans("pretrain")(b)), others=PRETRAIN),
    "stage.pretrain.lr": Wire(3e-3, max_lr("pretrain"), others=PRETRAIN),
    "stage.pretrain.min_lr_ratio": Wire(
        0.5, lambda b: rate("pretrain")(b).min_lr / rate("pretrain")(b).max_lr, others=PRETRAIN
    ),
    "parallel.cuda_graph": Wire("always", graph_refusal, "parallel.cuda_graph=always"),
    "stage.zero_neuron.steps": Wire(3, lambda b: len(plans("zero_neuron")(b))),
    "stage.zero_neuron.resets_eviction_channel": Wire(
        False, lambda b: len(b.recorded.of("reset_channel")), 0
    ),
    "stage.zero_neuron.loss": Wire("lm", losses("zero_neuron"), {"lm"}),
    "stage.zero_neuron.lr": Wire(3e-3, max_lr("zero_neuron")),
    "stage.retrofit.target_cr": Wire(2.0, lambda b: plans("retrofit")(b)[-1].target_cr),
    "stage.retrofit.steps_per_cr": Wire(3, lambda b: len(plans("retrofit")(b)), 6),
    "stage.retrofit.start_cr": Wire(2.0, lambda b: plans("retrofit")(b)[0].target_cr, 2.5),
    "stage.retrofit.annealing": Wire(
        "immediate", lambda b: {plan.target_cr for plan in plans("retrofit")(b)}, {3.0}
    ),
    "stage.retrofit.max_kl": Wire(
        0.8, lambda b: next(s.max_kl for s in b.prepared.stages if s.name == "retrofit")
    ),
    "stage.retrofit.layer_ratios": Wire(
        {0: 2.0}, lambda b: plans("retrofit")(b)[0].layer_weights, weights_at_half
    ),
    "stage.retrofit.loss": Wire("lm", losses("retrofit"), {"lm"}),
    "stage.retrofit.lr": Wire(3e-3, max_lr("retrofit")),
    "stage.hold.steps": Wire(4, lambda b: len(plans("hold")(b))),
    "stage.hold.branch_ratios": Wire([2], lambda b: b.recorded.of("load"), [("step_00000004",)]),
    "stage.hold.loss": Wire("lm", losses("hold"), {"lm"}),
    "stage.hold.lr": Wire(3e-3, max_lr("hold")),
    "stage.hold.min_lr_ratio": Wire(0.5, lambda b: rate("hold")(b).min_lr / rate("hold")(b).max_lr),
    "stage.export.dtype": Wire(
        "bf16",
        lambda b: load_file(exported(b) / "model.safetensors")[EMBEDDING].dtype,
        torch.bfloat16,
    ),
    "stage.export.format": Wire("dms", lambda b: read_format(exported(b)), others=FASTDMS),
    "stage.export.paged_attention_block_size": Wire(
        512, export_state("dms_paged_attention_block_size"), others=NVIDIA
    ),
    "stage.export.every_integer_cr": Wire(
        False, lambda b: [name for name, *_ in b.recorded.of("export")], ["final"]
    ),
    "data.paths": Wire(lambda assets: [assets.more], tokens, second_corpus),
    "data.weights": Wire(
        [3.0, 1.0],
        blend,
        [0.75, 0.25],
        others={"data.paths": lambda assets: [assets.data, assets.more]},
    ),
    "data.cache_dir": Wire(
        lambda assets: str(assets.model.parent / "indices"),
        lambda b: str(b.samples[0]._dataset.config.path_to_cache),
    ),
    "data.eod_mask_loss": Wire(True, lambda b: b.samples[0]._dataset.config.eod_mask_loss),
    "data.split": Wire("50,50,0", documents, 30),
    "data.seq_length": Wire(24, lambda b: b.batches[0].tokens.shape[1]),
    "data.micro_batch_size": Wire(2, lambda b: len(b.batches[0].tokens)),
    "data.global_batch_size": Wire(8, lambda b: len(b.batches)),
    "data.global_batch_size (of the loop)": Wire(8, lambda b: b.components.global_batch_size),
    "data.packing": Wire(True, lambda b: b.batches[0].documents is not None),
    "data.packing (of the engine)": Wire(True, lambda b: b.engine._options.packs_documents),
    "parallel.tensor_model_parallel_size": Wire(2, megatron("tensor_model_parallel_size")),
    "parallel.pipeline_model_parallel_size": Wire(
        2,
        megatron("pipeline_model_parallel_size"),
    ),
    "parallel.context_parallel_size": Wire(2, megatron("context_parallel_size")),
    "parallel.virtual_pipeline_model_parallel_size": Wire(
        2,
        megatron("virtual_pipeline_model_parallel_size"),
        others={"parallel.pipeline_model_parallel_size": 2},
    ),
    "parallel.num_layers_in_first_pipeline_stage": Wire(
        3,
        megatron("num_layers_in_first_pipeline_stage"),
        others={"parallel.pipeline_model_parallel_size": 2},
    ),
    "parallel.num_layers_in_last_pipeline_stage": Wire(
        3,
        megatron("num_layers_in_last_pipeline_stage"),
        others={"parallel.pipeline_model_parallel_size": 2},
    ),
    "parallel.expert_model_parallel_size": Wire(
        2, megatron("expert_model_parallel_size"), others=EXPERTS
    ),
    "parallel.layers": Wire("transformer_engine", layers, "parallel.layers=transformer_engine"),
    "parallel.distributed_timeout_minutes": Wire(4.0, patience, 120.0),
    "parallel.sequence_parallel": Wire(
        True,
        megatron("sequence_parallel"),
        others={"parallel.tensor_model_parallel_size": 2},
    ),
    "parallel.tp_comm_overlap": Wire(
        True,
        megatron("tp_comm_overlap"),
        others={"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True},
    ),
    "parallel.fp8": Wire(
        True, layers, "parallel.fp8=true", others={"parallel.params_dtype": "bf16"}
    ),
    "parallel.params_dtype": Wire(
        "bf16", lambda b: next(b.engine._models[0].parameters()).dtype, torch.bfloat16
    ),
    "parallel.params_dtype (of the self-test)": Wire(
        "bf16", lambda b: b.components.exporter.params_dtype
    ),
    "parallel.recompute_granularity": Wire(
        "full", lambda b: b.engine._models[0].decoder.config.recompute_granularity
    ),
    "parallel.recompute_modules": Wire(
        ["mlp"],
        lambda b: [layer.recompute_mlp for layer in b.engine._models[0].decoder.layers],
        [True, True],
        others={"parallel.recompute_granularity": "selective"},
    ),
    "parallel.recompute_num_layers": Wire(
        2,
        lambda b: b.engine._models[0].decoder.config.recompute_num_layers,
        others={"parallel.recompute_granularity": "full"},
    ),
    "optim.lr": Wire(3e-3, adam("lr")),
    "optim.weight_decay": Wire(0.5, adam("weight_decay")),
    "optim.adam_beta1": Wire(0.5, lambda b: adam("betas")(b)[0]),
    "optim.adam_beta2": Wire(0.7, lambda b: adam("betas")(b)[1]),
    "optim.adam_eps": Wire(1e-4, adam("eps")),
    "optim.clip_grad": Wire(
        0.25, lambda b: compat.optimizer_parts(b.engine._optimizer)[0].config.clip_grad
    ),
    "optim.lr_warmup_steps": Wire(3, lambda b: rate("zero_neuron")(b).warmup_steps),
    "observe.tensorboard": Wire(True, sinks, ["JsonlSink", "TensorBoardSink"]),
    "observe.wandb": Wire("offline", sinks, ["JsonlSink", "WandbSink"]),
    "observe.progress": Wire(
        True, lambda b: type(b.components.reporter.progress).__name__, "LineProgress"
    ),
    "observe.peak_tflops": Wire(989.0, lambda b: b.components.reporter.compute.peak_tflops),
    "run.seed (of the noise)": Wire(77, noise, expected_noise),
    "run.seed (of the data)": Wire(
        77,
        lambda b: b.samples[0]._dataset.config.random_seed,
    ),
    "run.seed (of new weights)": Wire(
        77,
        embedding,
        lambda b: float(RandomWeights(refusals.architecture(), 77, 0.02).get(EMBEDDING).sum()),
        SCRATCH,
    ),
    "run.load": Wire(loaded, embedding, other_embedding),
    "run.max_skipped_steps": Wire(7, lambda b: b.components.skips.max_consecutive),
    "run.save_interval": Wire(1, saves, [f"step_{step:08d}" for step in range(1, 9)]),
    "run.async_save": Wire(False, lambda b: b.components.saver.options.async_save),
    "run.keep_checkpoints": Wire(4, kept, others=EVERY_STEP),
    "run.eval_interval": Wire(1, lambda b: len(b.recorded.of("evaluate")), 8),
    "run.eval_samples": Wire(6, lambda b: len(b.components.eval_batches)),
    "run.log_interval": Wire(9, lambda b: b.components.reporter.log_interval),
    "run.dir": Wire(
        lambda assets: str(assets.model.parent / "elsewhere"),
        lambda b: str(b.components.saver.folder.parent),
    ),
    "teacher.offload": Wire(
        True, lambda b: isinstance(b.engine._models[0]._teacher[0], OffloadedTeacher)
    ),
    "kernels": Wire("reference", lambda b: b.engine._attend.__module__.rpartition(".")[2]),
}


# read back by a test that starts the command, or a part of it that needs more than a process
ELSEWHERE = {
    "method.kind": "unit/wiring/test_training.py::test_the_method_decides_in_every_layer",
    "observe.project": "unit/observe/test_sinks.py::test_the_names_of_a_run_read_back",
    "observe.entity": "unit/observe/test_sinks.py::test_the_names_of_a_run_read_back",
    "observe.name": "unit/observe/test_sinks.py::test_the_names_of_a_run_read_back",
    "optim.offload": (
        "gpu/test_optimizer_memory.py::test_steps_of_an_offloaded_optimizer_are_those_of_the_gpu"
    ),
    "optim.state_dtype": "gpu/test_optimizer_memory.py::test_moments_are_in_bf16",
    "parallel.ddp_bucket_size": (
        "unit/app/test_trace.py::test_ddp_bucket_size_divides_the_reduction_of_gradients"
    ),
    "teacher.logits": (
        "unit/wiring/test_teacher_logits.py::test_a_retrofit_without_the_teacher_is_the_one_with_it"
    ),
    "stage.teacher_logits.samples": (
        "unit/wiring/test_teacher_logits.py::test_every_sample_is_stored_once_with_its_distribution"
    ),
    "stage.teacher_logits.top_k": (
        "unit/wiring/test_teacher_logits.py::test_a_folder_is_not_continued_with_other_settings"
    ),
    "run.resume": "e2e/bad_inputs/test_run.py::test_bad_input_is_refused",
    "run.check_teacher": ("unit/wiring/test_teacher_check.py::test_a_silent_teacher_is_refused"),
    "run.dry_run": "e2e/test_evaluate_stage.py::test_the_plan_names_the_tasks",
}


@pytest.fixture(autouse=True)
def _hub(assets: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the hub with two revisions of a model."""
    root = tmp_path / "hub" / "models--me--tiny"
    for name, commit in (("main", "a" * 40), ("two", "b" * 40)):
        shutil.copytree(assets.model, root / "snapshots" / commit)
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / name).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize("key", WIRES)
def test_an_option_acts(built: Callable[..., Built], assets: Assets, key: str) -> None:
    wire = WIRES[key]
    before = wire.read(built(**wire.given(assets)))
    run = built(**wire.given(assets, option(key)))
    found = wire.read(run)
    assert found == wire.expectation(run)
    assert before != found, "the value is the default, or another option decides"


@pytest.mark.parametrize(
    ("preset", "window", "layer"), [("dms", 4, DMSLayer), ("dmc", 0, DMCLayer)]
)
def test_the_method_decides_in_every_layer(
    built: Callable[..., Built], preset: str, window: int, layer: type
) -> None:
    """method.kind"""
    engine = built(**{"method": {**asdict(PRESETS[preset]), "window": window}}).engine
    assert {
        type(each.self_attention.method.layer) for each in engine._models[0].decoder.layers
    } == {layer}


def test_the_teacher_is_the_original_and_the_student_is_what_run_load_names(
    built: Callable[..., Built], assets: Assets
) -> None:
    run = built(**{"run.load": str(assets.other)})
    teacher = run.engine._models[0]._teacher[0]
    kept = teacher.embedding.word_embeddings.weight[: refusals.architecture().vocab_size]
    original = load_file(assets.model / "model.safetensors")[EMBEDDING]
    assert torch.equal(kept, original)
    assert embedding(run) == other_embedding(run)
    assert not torch.equal(original, load_file(assets.other / "model.safetensors")[EMBEDDING])


@pytest.mark.parametrize("kind", ["export", "checkpoint"])
def test_a_retrofit_continues_from_the_ratio_of_what_run_load_names(
    built: Callable[..., Built], tmp_path: Path, kind: str
) -> None:
    state = TrainState(eviction_enabled=True, target_cr=2.5, channel_scale=0.0)
    source = built()
    student = source.components.exporter.export("cr", state.to_dict())
    if kind == "export":
        student = student / "hf"
    else:
        student = tmp_path / "checkpoint"
        source.components.saver.engine.save(
            student, {**state.to_dict(), **source.components.saver.provenance}
        )
    run = built(**{"run.load": str(student), "stage.run": ["retrofit", "hold"]})
    found = [plan.target_cr for plan in plans("retrofit")(run)]
    assert found == [3.0]  # one step of 2 a unit, from 2.5 on
    held = built(**{"run.load": str(student), "stage.run": ["hold"]})
    assert {plan.target_cr for plan in plans("hold")(held)} == {2.5}


def test_a_checkpoint_with_other_adapters_is_refused_before_a_model_is_built(
    built: Callable[..., Built], tmp_path: Path
) -> None:
    lora = {"method.train": "lora", "lora": {"rank": 2}}
    source = built(**lora)
    state = TrainState(eviction_enabled=True, target_cr=2.0, channel_scale=0.0).to_dict()
    student = tmp_path / "checkpoint"
    source.components.saver.engine.save(student, {**state, **source.components.saver.provenance})
    load = {"run.load": str(student), "stage.run": ["hold"]}
    values = r"method\.train=lora lora\.rank=2 lora\.alpha=32 lora\.targets=\[q,k,v,o\]"
    for changes, own in (({}, "all"), ({"method.train": "attention"}, "attention")):
        refusal = f"holds adapters of {values}, and this run has method.train={own}; .*exports/"
        with pytest.raises(CheckpointError, match=refusal):
            _ = built(**load, **changes).prepared
    assert built(**load, **lora).prepared.start.student == student


def test_a_later_job_resumes_a_student_with_frozen_weights(
    built: Callable[..., Built], view: ParallelView, tmp_path: Path
) -> None:
    changes = {"run.dir": str(tmp_path / "run"), "method.train": "lora"}
    first = built(**changes)
    run_folder.write(first.config, is_main_rank=True)
    saver = first.components.saver
    recorded = inputs.record(first.config.data.paths, first.assets.model, view)
    newest = tmp_path / "run" / "checkpoints" / "step_00000001"
    saver.engine.save(newest, {**TrainState(step=1).to_dict(), **saver.provenance, **recorded})
    later = built(**changes)
    assert later.prepared.start.resumes
    assert later.prepared.start.student == newest
    found, expected = dict(later.engine.hf_tensors()), dict(first.engine.hf_tensors())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # the original is shared, not loaded a second time
    assert isinstance(later.engine._models[0].teacher, SharedTeacher)


def test_every_option_has_a_test() -> None:
    own = [key for key in leaves(RunConfig) if not key.startswith(("cluster.", *EVALUATED))]
    assert uncovered(own, WIRES, ELSEWHERE) == []
    assert missing_tests(ELSEWHERE) == []
