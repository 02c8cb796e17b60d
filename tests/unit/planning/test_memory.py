"""Memory estimates against numbers computed by hand."""

from __future__ import annotations

import math

import pytest

from dms_train.families import LayerAttention
from dms_train.hf.tensors import expected_shapes
from dms_train.planning import memory as planned
from dms_train.planning.activations import padded_vocab
from dms_train.planning.gpus import GPUS, calibration
from dms_train.planning.memory import estimate, estimate_stages
from dms_train.planning.parameters import parameter_count
from dms_train.planning.pipeline_stage import stages_of
from dms_train.planning.run_size import checkpoint_bytes
from tests.support import configs


def test_a_stored_teacher_costs_the_distributions_of_a_step():
    live = configs.config()
    stored = configs.config(teacher__logits="some/run", stage__teacher_logits={"top_k": 10})
    model = configs.architecture()
    with_teacher, without = (estimate(config, model, 1) for config in (live, stored))
    # 8 samples of 64 positions: 10 tokens of 4 bytes and probabilities of 2, and the tail
    assert without.teacher == 8 * 64 * (10 * (4 + 2) + 4)
    assert with_teacher.teacher == with_teacher.weights
    assert without.workspace <= with_teacher.workspace


def test_an_offloaded_teacher_leaves_its_tables_and_two_layers_on_the_gpu():
    resident, offloaded = configs.config(), configs.config(teacher__offload=True)
    a = configs.architecture()
    before, after = (estimate(config, a, 1) for config in (resident, offloaded))
    tables = padded_vocab(a) * a.hidden_size * (2 - a.tie_word_embeddings)
    layers = parameter_count(a) - a.vocab_size * a.hidden_size * (2 - a.tie_word_embeddings)
    (stage,) = stages_of(offloaded, a, 1)
    assert stage.host_bytes == 4 * (layers - a.hidden_size)
    assert after.teacher == 4 * (tables + a.hidden_size)
    assert before.teacher - after.teacher == stage.host_bytes
    # only the moment in which a layer of the teacher runs holds the two
    slots = 2 * stage.host_bytes // a.num_layers
    layer, head = planned._forward(stage, 0, has_head=True)
    (plain,) = stages_of(resident, a, 1)
    layer_before, head_before = planned._forward(plain, 0, has_head=True)
    assert layer.workspace - layer_before.workspace == slots
    assert head == head_before


def test_an_offloaded_teacher_is_counted_before_it_leaves_the_gpu():
    config = configs.config(teacher__offload=True, parallel__params_dtype="bf16")
    a = configs.architecture(num_layers=36, hidden_size=5120, ffn_hidden_size=32768)
    (stage,) = stages_of(config, a, 512)  # so many copies hold few moments
    memory = estimate(config, a, 512)
    masters = 4 * stage.updated
    whole = 2 * parameter_count(a)
    assert memory.total >= memory.weights + memory.gradients + masters + 0.99 * whole


def test_an_offloaded_optimizer_leaves_the_gpu():
    bf16 = {"parallel__params_dtype": "bf16"}
    a = configs.architecture()
    before, after = (
        estimate(configs.config(**bf16, optim__offload=offload), a, 1) for offload in (False, True)
    )
    parameters = parameter_count(a)
    assert (before.optimizer, after.optimizer) == (12 * parameters, 0)
    assert after.kinds() | {"optimizer": 0} == before.kinds() | {"optimizer": 0}
    (stage,) = stages_of(configs.config(**bf16, optim__offload=True), a, 1)
    # two buffers for gradients in fp32, and two for weights in bf16
    assert stage.host_optimizer_bytes == 12 * parameters + 2 * 2**25 * (4 + 2)
    (shard,) = stages_of(configs.config(**bf16, optim__offload=True), a, 4)
    assert shard.host_optimizer_bytes == 12 * parameters // 4 + 2 * 2**25 * (4 + 2)
    (stage,) = stages_of(configs.config(**bf16), a, 1)
    assert stage.host_optimizer_bytes == 0


def test_moments_in_bf16_take_four_bytes_less_and_a_piece_of_them_in_fp32():
    changes = {"parallel__params_dtype": "bf16", "optim__state_dtype": "bf16"}
    a = configs.architecture(num_layers=36, hidden_size=5120, ffn_hidden_size=32768)
    parameters = parameter_count(a)
    assert estimate(configs.config(**changes), a, 1).optimizer == 8 * parameters
    (stage,) = stages_of(configs.config(**changes), a, 1)
    # the matrices of gate and up are the largest
    assert planned._update(stage).workspace == 2 * 4 * 2 * 5120 * 32768
    (shard,) = stages_of(configs.config(**changes), a, 512)
    assert planned._update(shard).workspace == 2 * 4 * shard.updated < 2 * 4 * 2**27


def test_an_8b_model_trains_all_its_weights_on_one_gpu_of_80_gb():
    a = configs.KNOWN["llama31_8b"]
    changes = {
        "parallel__params_dtype": "bf16",
        "parallel__recompute_granularity": "full",
        "data__seq_length": 8192,
        "data__micro_batch_size": 1,
        "teacher__offload": True,
    }
    gpu, c = GPUS["h100"], calibration()
    resident, offloaded = (
        estimate(configs.config(**changes, optim__offload=offload), a, 1).needed(c, 1)
        for offload in (False, True)
    )
    assert offloaded < gpu.memory < resident


def test_storing_a_teacher_takes_its_weights_and_no_state_of_a_training():
    stage = {"run": ["teacher_logits"], "teacher_logits": {"samples": 16}}
    values = {f"stage__{key}": value for key, value in stage.items()}
    memory = estimate(configs.config(**values), configs.architecture(), 1)
    assert memory.weights == 4 * parameter_count(configs.architecture())
    assert (memory.gradients, memory.optimizer, memory.teacher, memory.activations) == (0,) * 4
    assert memory.workspace > 0


def test_bytes_per_parameter():
    memory = estimate(configs.config(), configs.architecture(), 1)
    parameters = memory.weights // 4
    assert parameters == parameter_count(configs.architecture())
    assert (memory.gradients, memory.optimizer) == (4 * parameters, 8 * parameters)
    assert memory.teacher == memory.weights
    fixed = memory.weights + memory.gradients + memory.optimizer + memory.teacher
    assert memory.fixed == fixed
    assert memory.total == sum(memory.kinds().values()) > fixed


def test_precision_copies_and_losses():
    changes = {
        "parallel__params_dtype": "bf16",
        "stage__zero_neuron__loss": "lm",
        "stage__retrofit__loss": "lm",
    }
    memory = estimate(configs.config(**changes), configs.architecture(), 4)
    parameters = memory.gradients // 4
    assert memory.weights == 2 * parameters
    assert memory.optimizer == 12 * parameters // 4
    assert memory.teacher == 0


def test_experts_are_divided_and_their_state_too():
    a = configs.architecture(family="qwen3_moe")
    whole, halves = (
        estimate(configs.config(parallel__expert_model_parallel_size=size), a, 4) for size in (1, 2)
    )
    experts = 4 * 3 * 64 * 24 * a.num_layers  # of all layers
    assert whole.weights - halves.weights == 4 * experts // 2
    # all four processes together hold the moments once, in either layout
    assert halves.optimizer == pytest.approx(whole.optimizer, abs=8)


def test_tensor_and_pipeline_shares():
    whole = estimate(configs.config(), configs.architecture(), 1).weights
    halves = configs.config(parallel__tensor_model_parallel_size=2)
    assert estimate(halves, configs.architecture(), 2).weights == pytest.approx(whole / 2, rel=0.01)
    stages = configs.config(parallel__pipeline_model_parallel_size=2)
    assert whole / 2 < estimate(stages, configs.architecture(), 2).weights < whole


def trained(train: str, **changes) -> tuple[int, int, int]:
    """Parameters that train, those with Adam's moments, and those of the teacher alone."""
    memory = estimate(configs.config(method__train=train, **changes), configs.architecture(), 1)
    return memory.gradients // 4, memory.optimizer // 8, memory.teacher // 4


def test_frozen_weights_have_no_gradients_and_are_shared_with_the_teacher():
    layers, hidden, query, key = 4, 64, 64, 32
    attention = layers * 2 * hidden * (query + key)
    rows = layers * 2 * hidden  # of the eviction channels of two KV heads
    lora = layers * 16 * (3 * hidden + query + 2 * key + query + hidden) + rows
    assert trained("attention") == (attention, attention, attention)
    assert trained("channel") == (rows, rows, 0)
    assert trained("lora") == (lora, lora, 0)
    everything = parameter_count(configs.architecture())
    # the frozen weights of a further trained student are not the teacher's
    assert trained("lora", run__load="x") == (lora, lora, everything)


def test_trained_projections_of_attention_have_all_their_biases():
    a = configs.architecture(family="gpt_oss")
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    config = configs.config(method__train="attention", parallel=parallel)
    expected = 0
    for name, shape in expected_shapes(a).items():
        if "self_attn" in name and "sinks" not in name:
            divided = 1 if name.endswith("o_proj.bias") else 2
            expected += math.prod(shape) // divided
    assert estimate(config, a, 2).gradients == 4 * expected


@pytest.mark.parametrize(("chunks", "layers"), [(None, (2, 0)), (2, (1, 1))])
def test_channels_are_counted_where_the_method_acts(chunks, layers):
    full, local = (LayerAttention(rotary_base=1e4, window=window) for window in (None, 8))
    a = configs.architecture(family="qwen2", layers=(full, full, local, local))
    parallel = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": chunks,
    }
    config = configs.config(method__train="channel", parallel=parallel)
    row = 2 * (64 + 1)  # weights and biases of two KV heads
    per_stage = [memory.gradients // 4 for memory in estimate_stages(config, a, 2)]
    assert per_stage == [count * row for count in layers]
    one, two = (
        checkpoint_bytes(configs.config(method__train=train), a) for train in ("channel", "lora")
    )
    lora = 4 * 16 * (3 * 64 + 64 + 2 * 32 + 64 + 64)
    assert two - one == lora * 4 * 4
    assert one == 4 * parameter_count(a) + 2 * row * 4 * 4


def test_an_8b_model_with_lora_fits_one_gpu_of_80_gb():
    size = {"data__seq_length": 8192, "parallel__params_dtype": "bf16"}
    needed = {
        train: estimate(
            configs.config(method__train=train, method__window=256, **size),
            configs.KNOWN["llama31_8b"],
            1,
        ).needed(calibration(), 1)
        for train in ("all", "lora")
    }
    assert needed["lora"] < GPUS["h100"].memory < needed["all"]
