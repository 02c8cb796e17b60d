"""Every cross-field rule: one line that names the value and the fix."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from dms_train.config.build import ConfigError
from dms_train.families import FAMILIES, LayerAttention
from dms_train.hf.experts import Experts
from dms_train.method.spec import PRESETS
from dms_train.planning import divide
from dms_train.planning.check import check
from tests.support import configs

TP, CP = "parallel__tensor_model_parallel_size", "parallel__context_parallel_size"
PP = "parallel__pipeline_model_parallel_size"
EP = "parallel__expert_model_parallel_size"
EXPERTS = Experts(count=4, topk=2, ffn_hidden_size=24, normalize=True)
VP = "parallel__virtual_pipeline_model_parallel_size"
FIRST = "parallel__num_layers_in_first_pipeline_stage"
LAST = "parallel__num_layers_in_last_pipeline_stage"
SELECTIVE = {"parallel__recompute_granularity": "selective"}
MODULES = "parallel__recompute_modules"
SCRATCH = {"model__path": None, "model__architecture": dataclasses.asdict(configs.architecture())}

RETROFIT = {"target_cr": 4, "steps_per_cr": 10}
DMC, DMS = (dataclasses.asdict(PRESETS[name]) for name in ("dmc", "dms"))
STORES = {"stage__run": ["teacher_logits"], "stage__teacher_logits": {"samples": 16}}
GRAPH = {"parallel__cuda_graph": "always"}
FP8 = {"parallel__fp8": True, "parallel__params_dtype": "bf16"}
TASKS = {"stage__run_tasks": {"tasks": ["exam_sheets"]}}


def run_check(world_size: int = 1, model: dict | None = None, **changes) -> None:
    architecture = configs.architecture(**(model or {}))
    check(configs.config(**changes), world_size=world_size, architecture=architecture)


def problems(world_size: int = 1, model: dict | None = None, **changes) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        run_check(world_size, model, **changes)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, {}),
        (8, {}),
        (2, {TP: 2}),
        (8, {TP: 2, PP: 2, "parallel__sequence_parallel": True}),
        (4, {PP: 2, VP: 2}),
        (6, {PP: 3, FIRST: 1, LAST: 1}),
        (
            1,
            {
                "stage__run": ["retrofit"],
                **SCRATCH,
                "run__load": "x",
                "stage__retrofit__loss": "lm",
            },
        ),
        (1, {"stage__zero_neuron__steps": 0}),
        (1, {"teacher__logits": "x"}),
        (1, STORES),
        (1, {**STORES, "stage__teacher_logits": {"samples": 8, "top_k": 10**6}}),
        (1, {"stage__run": ["pretrain", "export"], **SCRATCH}),
        (1, {"stage__run": ["pretrain", "export"]}),
        (1, {"stage__run": ["export"]}),
        (1, {"method__train": "lora", "lora": {"rank": 4}, "parallel__layers": "local"}),
        (1, {"method__train": "attention", "parallel__layers": "transformer_engine"}),
        (1, {"stage__run": ["zero_neuron", "retrofit", "export", "validate_export"]}),
        (1, {"stage__run": ["pretrain", "export", "run_tasks"], **SCRATCH, **TASKS}),
        (1, {"stage__run": ["hold", "export"], "run__load": "x"}),
        (1, {"stage__run": ["zero_neuron"], "method__window": 64}),
        (1, GRAPH),
        (2, GRAPH),
        (1, {**GRAPH, "parallel__ddp_bucket_size": 1000}),
        (2, {TP: 2, "parallel__cuda_graph": "auto"}),
        (1, {**FP8, "method__train": "attention"}),
        (1, {**FP8, **GRAPH}),
        (2, {**FP8, TP: 2, "parallel__sequence_parallel": True, "cluster": {"gpu": "h100"}}),
    ],
)
def test_sound_configurations_pass(world_size, changes):
    run_check(world_size, **changes)


@pytest.mark.parametrize(
    ("world_size", "changes", "expected"),
    [
        (3, {TP: 2}, "does not divide the 3 process(es)"),
        (1, {TP: 2}, "start a multiple of 2"),
        (8, {TP: 8}, "does not divide the model's num_query_groups=2"),
        (3, {TP: 3}, "use a divisor of 128"),
        (3, {PP: 3}, "the model's 4 layers do not divide into 3 chunks"),
        (1, {VP: 2}, "needs parallel.pipeline_model_parallel_size above 1"),
        (2, {PP: 2, VP: 4}, "do not divide into 8 chunks"),
        (2, {FIRST: 1}, "need parallel.pipeline_model_parallel_size above 1"),
        (4, {PP: 4, FIRST: 2}, "(layers by stage: 2, 0, 0, 0)"),
        (2, {PP: 2, FIRST: 2, LAST: 1}, "(layers by stage: 2, 1)"),
        (2, {PP: 2, FIRST: 0}, "parallel.num_layers_in_first_pipeline_stage=0"),
        (2, {PP: 2, VP: 2, LAST: 1}, "3, 1 layers by stage do not divide into 2 chunks each"),
        (1, {**SELECTIVE, MODULES: ("mpl",)}, "recompute_modules=[mpl]: name one or both of"),
        (1, {**SELECTIVE, MODULES: ()}, "recompute_modules=[]: name one or both of core_attn, mlp"),
        (1, {MODULES: ("mlp",)}, "needs parallel.recompute_granularity=selective"),
        (4, {PP: 2, VP: 2, "data__global_batch_size": 6}, "use a multiple of 4"),
        (1, {"parallel__sequence_parallel": True}, "parallel.sequence_parallel=true: needs"),
        (2, {TP: 2, "parallel__tp_comm_overlap": True}, "parallel.tp_comm_overlap=true: needs"),
        (
            2,
            {TP: 2, "parallel__sequence_parallel": True, "data__seq_length": 63},
            "sequence parallelism needs a multiple of 2",
        ),
        (
            4,
            {CP: 4},
            "does not divide the 2 KV heads of a tensor-parallel rank; use a divisor of 2",
        ),
        (4, {TP: 2, CP: 2}, "does not divide the 1 KV heads of a tensor-parallel rank"),
        (2, {CP: 2, "data__seq_length": 63}, "context parallelism needs a multiple of 2"),
        (3, {CP: 2}, "tensor x pipeline x context size is 2, which does not divide the 3 process"),
        (3, {}, "micro_batch_size x data-parallel size = 1 x 3"),
        (1, {"data__seq_length": 129}, "the model reads at most 128 positions"),
        (1, {"method__window": 64}, "method.window=64: not below data.seq_length=64"),
        (4, {TP: 2, **GRAPH}, "parallel.cuda_graph=always: the 2 ranks of a copy"),
        (
            1,
            {**GRAPH, "parallel__recompute_granularity": "full"},
            "parallel.recompute_granularity=full reads random states",
        ),
        (1, {**GRAPH, "data__packing": True}, "set data.packing=false"),
        (2, {**GRAPH, "parallel__ddp_bucket_size": 1000}, "set parallel.ddp_bucket_size to null"),
        (1, {"parallel__fp8": True}, "parallel.fp8=true: needs parallel.params_dtype=bf16"),
        (1, {**FP8, "parallel__layers": "local"}, "parallel.layers=local has no FP8 products"),
        (
            2,
            {**FP8, TP: 2, "parallel__sequence_parallel": True, "parallel__tp_comm_overlap": True},
            "parallel.tp_comm_overlap=true runs megatron-core's own layers",
        ),
        (1, {**FP8, "method__train": "lora"}, "parallel.fp8=true: method.train=lora runs"),
        (1, {**FP8, **STORES}, "parallel.fp8=true: teacher_logits stores"),
        (1, {**FP8, "cluster": {"gpu": "a100_80gb"}}, "A100 SXM 80 GB has no FP8 products"),
        (1, {**FP8, "data__seq_length": 56}, "data.seq_length=56: FP8 products"),
        (
            2,
            {**FP8, TP: 2, "parallel__sequence_parallel": True, "data__seq_length": 80},
            "need a multiple of 32, 16 tokens on each rank",
        ),
    ],
)
def test_sizes_that_do_not_fit(world_size, changes, expected):
    assert any(expected in line for line in problems(world_size, **changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"stage__run": []}, "stage.run=[]: name at least one"),
        ({"stage__run": ["retrofti"]}, "unknown stage 'retrofti'; did you mean retrofit?"),
        ({"stage__run": ["retrofit", "zero_neuron"]}, "as [zero_neuron, retrofit]"),
        ({"stage__run": ["export", "export"]}, "run each stage once, as [export]"),
        (
            {"stage__run": ["pretrain", "export", "validate_export"]},
            "leave it out after pretrain",
        ),
        ({"stage__run": ["pretrain", "retrofit"], **SCRATCH}, "are different runs"),
        (
            {"stage__run": ["pretrain"], "method__train": "lora"},
            "method.train=lora: pretrain trains all weights; set it to all",
        ),
        (
            {"method__train": "lora", "lora": {"targets": ["q", "w"]}},
            "lora.targets=[q,w]: name one or more of q,k,v,o",
        ),
        ({"lora": {"rank": 4}}, "lora: method.train=all has no low-rank adapters"),
        (
            {"method__train": "lora", "parallel__layers": "transformer_engine"},
            "the adapters of method.train=lora read norms that Transformer Engine does not return",
        ),
        ({"method__train": "some"}, "choose one of all, attention, channel, lora"),
        ({**SCRATCH}, "zero_neuron needs weights; set model.path"),
        ({**SCRATCH, "model__path": "x"}, "set exactly one"),
        (
            {"stage__run": ["retrofit"], **SCRATCH, "run__load": "x"},
            "distilling needs the original as teacher",
        ),
        ({"stage__run": ["validate_export", "export"]}, "as [export, validate_export]"),
        ({"stage__run": ["retrofit", "validate_export"]}, "put export before it"),
        (
            {
                "stage__run": ["retrofit", "export", "validate_export"],
                **SCRATCH,
                "run__load": "x",
                "stage__retrofit__loss": "lm",
            },
            "validate_export needs the original as teacher",
        ),
        (
            {"stage__run": ["retrofit", "export", "validate_export"], "run__eval_samples": 8},
            "stage.validate_export.samples=64: only run.eval_samples=8 validation samples exist",
        ),
        (
            {"stage__run": ["retrofit", "run_tasks"], **TASKS},
            "run_tasks measures what export wrote",
        ),
        ({"stage__run": ["export", "run_tasks"]}, "stage.run_tasks.tasks=[]: name at least one"),
        ({"stage__run_tasks": {"tasks": ["niah", "niah"]}}, "name each task once"),
        (
            {"stage__run_tasks": {"tasks": ["niah", "gsm8k"], "task": {"path": "x"}}},
            "stage.run_tasks.task.path: tasks cannot share a file",
        ),
        (
            {"stage__run_tasks": {"sweep": {"widths": [0]}}},
            "stage.run_tasks.sweep.widths=[0]: give chains of a document",
        ),
        (
            {"stage__run_tasks": {"policy": {"name": "window", "window": 4, "cr": 2.0}}},
            "stage.run_tasks.policy: give window or cr",
        ),
        (
            {"stage__validate_export": {"samples": 0}},
            "stage.validate_export.samples=0: use at least 1",
        ),
        ({"stage__validate_export": {"device": "tpu"}}, "use auto, cpu, cuda or cuda:1"),
        ({"stage__validate_export": {"answer_pattern": "x"}}, "0 groups; use one"),
        ({"stage__validate_export": {"answer_pattern": "("}}, "not a regular expression"),
        ({"stage__run": ["hold"]}, "hold needs retrofit before it, or run.load"),
        (
            {**STORES, "stage__run": ["teacher_logits", "retrofit"]},
            "run [teacher_logits], then the others with teacher.logits set to its run.dir",
        ),
        ({**STORES, "run__load": "x"}, "run.load=x: teacher_logits runs the original"),
        ({**STORES, "teacher__logits": "x"}, "teacher.logits=x: no stage to run distils"),
        (
            {"stage__retrofit": {**RETROFIT, "layer_ratios": {9: 2}}},
            "stage.retrofit.layer_ratios: the method does not act on layer 9",
        ),
        (
            {
                "stage__retrofit": {**RETROFIT, "layer_ratios": {0: 2}},
                "stage__run": ["zero_neuron"],
            },
            "stage.retrofit.layer_ratios: the stage retrofit reads it; add that to stage.run",
        ),
        (
            {"stage__retrofit": {**RETROFIT, "layer_ratios": {0: 1}}},
            "the other 3 layer(s) would have to evict 100% of their tokens to reach target_cr",
        ),
        (
            {"stage__retrofit": {**RETROFIT, "layer_ratios": {0: 0.5}}},
            "stage.retrofit.layer_ratios.0=0.5: use a number of at least 1",
        ),
        (
            {"stage__retrofit": {**RETROFIT, "layer_ratios": {0: 2}}, "method": DMC},
            "stage.retrofit.layer_ratios: method=dmc has one target for all layers",
        ),
        (
            {"teacher__offload": True, "teacher__logits": "x"},
            "teacher.offload=true: no teacher runs beside the student",
        ),
        (
            {"teacher__offload": True, "method__train": "lora"},
            "teacher.offload=true: with method.train=lora the teacher shares",
        ),
        (
            {"optim__state_dtype": "bf16"},
            "optim.state_dtype=bf16: needs bf16 weights and parallel.params_dtype=fp32; set that",
        ),
        (
            {"optim__state_dtype": "bf16", "optim__offload": True},
            "optim.state_dtype=bf16: the CPU updates moments in fp32; use fp32, or set",
        ),
        ({"optim__state_dtype": "fp16"}, "optim.state_dtype=fp16: choose one of fp32, bf16"),
        (
            {**STORES, "stage__teacher_logits": {"samples": 12}},
            "stage.teacher_logits.samples=12: use a multiple of data.global_batch_size=8",
        ),
        (
            {**STORES, "stage__teacher_logits": {}},
            "stage.teacher_logits.samples=null: use a multiple",
        ),
    ],
)
def test_stages_that_make_no_sense(changes, expected):
    (line,) = problems(**changes)
    assert expected in line


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"stage__retrofit__loss": "kl"}, "stage.retrofit.loss=kl: choose one of distill, lm"),
        (
            {"stage__export__format": "x"},
            "choose one of null, dmc, dms, fastdms, kvzap, nvidia, peft, trim_kv",
        ),
        ({"stage__export__dtype": "fp16"}, "choose one of null, fp32, bf16"),
        ({"parallel__params_dtype": "fp16"}, "parallel.params_dtype=fp16: choose one of"),
        ({"parallel__recompute_granularity": "all"}, "choose one of null, selective, full"),
        ({"observe__wandb": "on"}, "choose one of offline, online, disabled"),
        ({"run__dir": ""}, "run.dir=: use the path of a folder"),
        ({"run__resume": "yes"}, "run.resume=yes: choose one of auto, never"),
        ({"stage__retrofit__target_cr": 0.5}, "use at least 1"),
        ({"stage__retrofit__start_cr": 0.5}, "stage.retrofit.start_cr=0.5: use at least 1"),
        ({"stage__retrofit__target_cr": float("nan")}, "use at least 1"),
        ({"stage__zero_neuron__steps": -1}, "stage.zero_neuron.steps=-1: use at least 0"),
        ({"stage__retrofit__target_cr": float("inf")}, "use a finite number"),
        ({"stage__retrofit__target_cr": 1e5}, "use a number below 10000"),
        ({"stage__retrofit__steps_per_cr": 2**48}, "use a number below 281474976710656"),
        ({"optim__lr": float("inf")}, "use a finite number"),
        ({"run__seed": 2**32}, "use a number below 4294967296"),
        ({"stage__hold__min_lr_ratio": 1.5}, "use a number from 0 to 1"),
        ({"optim__adam_beta1": 1.0}, "use a number from 0 to below 1"),
        ({"optim__lr": 0.0}, "optim.lr=0.0: use a number above 0"),
        ({"optim__lr": float("nan")}, "optim.lr=nan: use a number above 0"),
        ({"stage__hold__lr": -1.0}, "stage.hold.lr=-1.0: use a number above 0"),
        ({TP: 0}, "parallel.tensor_model_parallel_size=0: use at least 1"),
        ({"data__paths": []}, "data.paths=[]: name at least one"),
        ({"data__weights": [1, 2]}, "2 weight(s) for 1 path(s)"),
        ({"data__weights": [-1]}, "use numbers above 0"),
        ({"data__split": "a,b,c"}, "data.split=a,b,c: use train,validation,test shares"),
        ({"data__split": "0,1,1"}, "data.split=0,1,1"),
        ({"method__preset": "dmss"}, "method.preset=dmss: choose one of"),
        ({"method__channel": 16}, "method.channel=16: a head has 16 channels; use at most 15"),
        ({"method__channel": -2}, "method.channel=-2: use at least -1, or auto"),
        ({"method__channel": "x"}, "method.channel=x: use a number, or auto"),
        ({"method__alpha_in_loss": "x"}, "method.alpha_in_loss=x: choose one of"),
    ],
)
def test_values_out_of_range(changes, expected):
    assert any(expected in line for line in problems(**changes))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"num_query_groups": 3}, "num_query_groups=3: does not divide num_attention_heads=4"),
        ({"kv_channels": 15}, "kv_channels=15: use an even head size"),
        (
            {"family": "gpt"},
            f"model.architecture.family=gpt: use one of {', '.join(FAMILIES)}",
        ),
        ({"num_layers": 0}, "model.architecture.num_layers=0: use a number above 0"),
        ({"family": "qwen3_moe", "experts": None}, "experts: does not fit family=qwen3_moe"),
        ({"experts": EXPERTS}, "experts: does not fit family=llama; set it to null"),
        (
            {"family": "qwen3_moe", "experts": dataclasses.replace(EXPERTS, topk=5)},
            "experts.topk=5: use 1 to count=4",
        ),
        (
            {"family": "qwen3_moe", "experts": dataclasses.replace(EXPERTS, ffn_hidden_size=0)},
            "experts.ffn_hidden_size=0: use a number above 0",
        ),
    ],
)
def test_architectures_that_cannot_be_built(model, expected):
    assert any(expected in line for line in problems(model=model))


def test_sinks_are_refused_by_other_methods_than_dms():
    refusal = "method.kind=dmc: the model has attention sinks; use method=dms"
    # a world size that fits no layout, so that there is a problem in any case
    for family, method in (("gpt_oss", DMC), ("gpt_oss", DMS), ("qwen3_moe", DMC)):
        lines = problems(3, {"family": family, "experts": EXPERTS}, method=method)
        assert (refusal in lines) == (family == "gpt_oss" and method == DMC)


@pytest.mark.parametrize(
    ("world_size", "family", "changes", "expected"),
    [
        (2, "llama", {EP: 2}, "size=2: llama models have no experts; use 1"),
        (3, "qwen3_moe", {EP: 3}, "size=3: does not divide the model's 4 experts"),
        (
            2,
            "qwen3_moe",
            {EP: 4},
            "size=4: does not divide the data-parallel x context-parallel size 2",
        ),
        (2, "qwen3_moe", {TP: 2}, "sequence_parallel=false: experts need it"),
        (1, "qwen3_moe", GRAPH, "cuda_graph=always: a mixture of experts"),
    ],
)
def test_layouts_that_do_not_fit_experts(world_size, family, changes, expected):
    changes = {"data__global_batch_size": 12, **changes}
    lines = problems(world_size, {"family": family}, **changes)
    assert any(expected in line for line in lines)


@pytest.mark.parametrize(
    ("world_size", "changes", "expected"),
    [
        (4, {TP: 4}, "size is 4, which does not divide the 2 key heads of linear attention"),
        (1, GRAPH, "cuda_graph=always: layers with linear attention are not captured"),
        (1, {"method": DMC}, "method.kind=dmc: the model has layers with linear attention"),
    ],
)
def test_layouts_that_do_not_fit_linear_attention(world_size, changes, expected):
    sizes = {"family": "qwen3_5_text", "num_query_groups": 4}
    lines = problems(world_size, sizes, **changes)
    assert any(expected in line for line in lines)


@pytest.mark.parametrize(
    ("world_size", "model", "expected"),
    [
        (1, {"hidden_size": 72}, "the model's hidden_size on a tensor-parallel rank is 72"),
        (
            2,
            {"ffn_hidden_size": 112},
            "the model's ffn_hidden_size on a tensor-parallel rank is 56",
        ),
        (
            1,
            {"kv_channels": 10},
            "num_attention_heads x kv_channels on a tensor-parallel rank is 40",
        ),
        (1, {"family": "qwen3_moe"}, "parallel.fp8=true: experts have no FP8 products"),
    ],
)
def test_models_without_fp8_products_are_refused(world_size, model, expected):
    lines = problems(world_size, model, **FP8, **{TP: world_size})
    assert any(expected in line for line in lines)


def test_overlapped_groups_stay_on_one_host() -> None:
    changes = {"parallel__sequence_parallel": True, "parallel__tp_comm_overlap": True}
    for world_size, per_host, refused in ((2, 1, True), (6, 3, True), (4, 2, False), (2, 2, False)):
        config = configs.config(**{TP: 2, **changes, "data__global_batch_size": 6 * world_size})
        words = {"world_size": world_size, "processes_per_host": per_host}
        with pytest.raises(ConfigError) if refused else contextlib.nullcontext() as caught:
            check(config, architecture=configs.architecture(), **words)
        if refused:
            (line,) = caught.value.problems
            assert line.startswith(
                "parallel.tp_comm_overlap=true: needs each tensor-parallel group"
            )
            assert f"hosts of {per_host} process(es) do not divide into groups of 2" in line


def test_all_problems_of_a_kind_are_listed_at_once():
    assert len(problems(optim__lr=0.0, run__seed=-1, stage__run=["x"])) == 3


@pytest.mark.parametrize(
    ("kinds", "train", "layout", "idle"),
    [
        # `f` reads all tokens, `w` has a window, `l` has linear attention
        ("ffww", "channel", {PP: 2}, "1"),
        ("ffww", "lora", {PP: 2}, None),
        ("fwfw", "channel", {PP: 2}, None),
        ("lllflllf", "attention", {PP: 2}, None),
        ("lllflllf", "attention", {PP: 4}, "0, 2"),
        ("lllflllf", "all", {PP: 4}, None),
        ("lllflllf", "channel", {PP: 2, FIRST: 3, LAST: 5}, "0"),
        ("lllflllf", "lora", {PP: 2, FIRST: 5, LAST: 3}, None),
        # chunks of two layers: the first stage has layers 0, 1, 4 and 5
        ("lllflllf", "lora", {PP: 2, VP: 2}, "0"),
        ("lllfflll", "lora", {PP: 2, VP: 2}, None),
    ],
)
def test_stages_without_trained_weights_are_refused(kinds, train, layout, idle):
    attention = {
        "f": LayerAttention(rotary_base=1e4),
        "w": LayerAttention(rotary_base=1e4, window=8),
        "l": LayerAttention(rotary_base=None, linear=True),
    }
    family = "qwen3_5_text" if "l" in kinds else "qwen2"
    layers = tuple(attention[kind] for kind in kinds)
    a = configs.architecture(family=family, num_layers=len(layers), layers=layers)
    config = configs.config(method__train=train, data__global_batch_size=12, **layout)
    lines = list(divide.problems(config, layout[PP], a))
    assert len(lines) == (idle is not None)
    for line in lines:
        trained = ", ".join(str(n) for n, kind in enumerate(kinds) if kind == "f")
        assert f"={layout[PP]}: method.train={train} trains only the layers {trained}," in line
        assert f"hold none of them: {idle};" in line
        assert "use fewer stages or method.train=all" in line
