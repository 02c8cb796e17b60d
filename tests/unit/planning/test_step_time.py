"""Expected times: operations against the model's own count, and what must never get faster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dms_train.families import LayerAttention
from dms_train.planning.flops import forward_flops_per_token
from dms_train.planning.gpus import GPUS, calibration
from dms_train.planning.memory import of_stage
from dms_train.planning.parameters import parameter_count
from dms_train.planning.pipeline_stage import stages_of
from dms_train.planning.step_time import sent_bytes, step_time, work_of
from tests.support import configs
from tests.support.experts import experts_of

RECORD = Path(__file__).parents[3] / "benchmarks/results/nvidia_h100_80gb_hbm3/train_step.json"
SMALL = replace(  # SmolLM2-135M
    configs.KNOWN["llama2_7b"],
    num_layers=30,
    hidden_size=576,
    ffn_hidden_size=1536,
    num_attention_heads=9,
    num_query_groups=3,
    kv_channels=64,
    vocab_size=49152,
    tie_word_embeddings=True,
)
A = replace(configs.KNOWN["llama2_7b"], vocab_size=32000)
LM = {"stage__zero_neuron__loss": "lm", "stage__retrofit__loss": "lm"}
SIZE = {"data__seq_length": 4096, "data__global_batch_size": 64}
TP, PP = "parallel__tensor_model_parallel_size", "parallel__pipeline_model_parallel_size"
BF16 = {"parallel__params_dtype": "bf16"}


def stages(world_size: int = 1, **changes):
    return stages_of(configs.config(**SIZE, **BF16, **changes), A, world_size)


def seconds(world_size: int = 1, gpu: str = "h100", **changes) -> float:
    return step_time(stages(world_size, **changes), GPUS[gpu], calibration()).total


def test_products_are_three_forward_passes_and_the_teachers():
    tokens = 64 * 4096
    attention = 4 * A.num_layers * A.num_attention_heads * A.kv_channels * 4097 / 2
    for changes, passes in ((LM, 3), ({}, 4)):
        work = work_of(stages(**changes)[0])
        forward = forward_flops_per_token(A, 4096) - attention
        assert work.matmul_flops == pytest.approx(passes * tokens * forward)
        assert work.attention_flops == pytest.approx((passes + 0.5) * tokens * attention)


def test_an_offloaded_teacher_costs_what_two_forward_passes_do_not_hide():
    """Every micro-batch copies the layers: 32 of 202 million weights of two bytes."""
    (plain,), (stage,) = stages(), stages(teacher__offload=True)
    copied = stage.microbatches * 2 * 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    assert work_of(stage).offload.host_bytes == copied
    gpu, c = GPUS["h100"], calibration()
    resident = step_time([plain], gpu, c)
    assert step_time([stage], gpu._replace(host_gbs=1e6), c) == resident
    attention = 4 * A.num_layers * 4096 * 4097 / 2 / (989e12 * c.attention_efficiency)
    matmul = 2 * A.num_layers * (4 * 4096**2 + 3 * 4096 * 11008) / (989e12 * c.matmul_efficiency)
    hidden = 2 * 64 * 4096 * (matmul + attention)
    exposed = step_time([stage], gpu, c).communication - resident.communication
    assert exposed == pytest.approx(copied / 50e9 - hidden)


def test_an_update_on_the_host_takes_the_bandwidth_of_its_memory():
    (plain,), (stage,) = stages(), stages(optim__offload=True)
    parameters = parameter_count(A)
    work, resident = work_of(stage), work_of(plain)
    assert (work.host_update_bytes, resident.host_update_bytes) == (28 * parameters, 0)
    # the gradients are still set to zero and added up on the device
    assert (work.update_bytes, resident.update_bytes) == (8 * parameters, 36 * parameters)
    update = step_time([stage], GPUS["h100"], calibration()).update
    assert update == pytest.approx(28 * parameters / 40e9 + 8 * parameters / 3.35e12)
    two = stages(
        2, **{TP: 2}, optim__offload=True
    )  # half of the weights, and of the memory's speed
    halves = step_time(two, GPUS["h100"], calibration()).update
    assert halves == pytest.approx(28 * parameters / 40e9, rel=0.01)


def test_moments_in_bf16_are_converted_for_the_update():
    (stage,) = stages(optim__state_dtype="bf16")
    assert work_of(stage).update_bytes == (36 + 24) * parameter_count(A)


def test_layers_with_a_window_attend_to_the_keys_in_it():
    layers = [LayerAttention(rotary_base=10000.0, window=w) for w in (None, 1) * 16]
    (stage,) = stages_of(configs.config(**SIZE, **BF16), replace(A, layers=tuple(layers)), 1)
    work = work_of(stage)
    whole = work_of(stages()[0])
    assert work.attention_flops / whole.attention_flops == pytest.approx((4097 / 2 + 1) / 4097)
    assert work.matmul_flops == whole.matmul_flops


def test_work_is_divided_by_the_layout():
    whole = work_of(stages()[0])
    for changes in ({TP: 4}, {PP: 4}):
        parts = [work_of(stage) for stage in stages(4, **changes)]
        ranks = 4 // len(parts)
        assert ranks * sum(p.matmul_flops for p in parts) == pytest.approx(whole.matmul_flops)
        assert ranks * sum(p.attention_flops for p in parts) == pytest.approx(whole.attention_flops)


def test_recomputing_and_slower_gpus_take_longer():
    times = [seconds(parallel__recompute_granularity=g) for g in (None, "selective", "full")]
    assert times == sorted(times)
    assert times[0] < times[2]
    assert seconds(gpu="h200") <= seconds(gpu="h100") < seconds(gpu="a100_80gb")


def test_more_gpus_take_less_time_but_never_less_than_their_share():
    alone = seconds()
    for changes in ({}, {TP: 8}, {PP: 8}):
        assert alone / 8 < seconds(8, **changes) < alone


def test_communication_leaves_the_node_where_a_group_does():
    near = work_of(stages(8, **{TP: 8})[0])
    far = work_of(stages(16, **{TP: 8})[0])
    assert near.link_bytes > 0
    assert near.network_bytes == 0
    assert far.network_bytes > 0


def test_products_hide_what_tp_comm_overlap_transfers():
    layout = {TP: 2, "parallel__sequence_parallel": True}
    plain, overlapped = (
        stages(2, **layout, parallel__tp_comm_overlap=overlap) for overlap in (False, True)
    )
    assert work_of(overlapped[0]).link_bytes == work_of(plain[0]).link_bytes
    c = calibration()
    # with slow links the transfers take longer than half of the products of four passes
    fast, slow = (GPUS["h100"]._replace(link_gbs=speed) for speed in (1e5, 1.0))
    per_step = 64 * 4096 * A.hidden_size * 2 / 2  # bytes of a tensor that a rank sends
    # three passes of the embedding and three of the head have no product of a layer
    left = 6 * per_step / (fast.link_gbs * 1e9 * c.link_efficiency)
    assert step_time(overlapped, fast, c).communication == pytest.approx(left)
    weights = 4 * A.hidden_size * (A.hidden_size + 0.75 * A.ffn_hidden_size)
    products = 4 * 2 * 64 * 4096 * A.num_layers * weights / 2
    hidden = products / 2 / (fast.tflops * 1e12 * c.matmul_efficiency)
    exposed = [step_time(s, slow, c).communication for s in (plain, overlapped)]
    assert exposed[0] - exposed[1] == pytest.approx(hidden)


def test_fp8_products_are_faster_and_their_weights_are_kept_twice():
    """The projection of q, k and v stays in bf16."""
    plain, cast = (stages(**LM, parallel__fp8=fp8)[0] for fp8 in (False, True))
    weights = A.num_layers * (4096**2 + 3 * 4096 * 11008)
    tokens = 64 * 4096
    saved = work_of(plain).matmul_flops - work_of(cast).matmul_flops
    assert saved == pytest.approx(3 * 2 * tokens * weights * 3 / 8)
    assert work_of(cast).attention_flops == work_of(plain).attention_flops
    assert work_of(cast).traffic_bytes == work_of(plain).traffic_bytes
    # the inputs of both products of an MLP have half of the bytes, and those of o a copy
    microbatch = plain.microbatch.tokens
    inputs = A.num_layers * microbatch * (4096 + 11008 - 4096)
    before, after = of_stage(plain), of_stage(cast)
    assert after.activations - before.activations == 2 * weights - inputs
    assert after.fixed == before.fixed


def test_copies_of_an_fp8_teacher_are_hidden_by_shorter_passes():
    plain, cast = (
        work_of(stages(teacher__offload=True, parallel__fp8=fp8)[0]).offload
        for fp8 in (False, True)
    )
    weights = A.num_layers * (4096**2 + 3 * 4096 * 11008)
    saved = plain.matmul_flops - cast.matmul_flops
    assert saved == pytest.approx(2 * 2 * 64 * 4096 * weights * 3 / 8)
    assert cast.host_bytes == plain.host_bytes


def test_experts_leave_the_node_where_their_ranks_do():
    model = configs.architecture(
        family="qwen3_moe", experts=replace(experts_of("qwen3_moe"), count=16)
    )
    for ep, far in ((8, False), (16, True)):
        made = configs.config(**SIZE, parallel__expert_model_parallel_size=ep)
        (stage,) = stages_of(made, model, 16)
        sent = sent_bytes(stage)
        assert work_of(stage).link_bytes == (0 if far else sent.expert)
        assert work_of(stage).network_bytes == sent.data + far * sent.expert


def test_microbatches_fill_the_pipeline():
    time = {
        size: step_time(
            stages(4, **{PP: 4, "data__micro_batch_size": size}), GPUS["h100"], calibration()
        )
        for size in (1, 16)
    }
    assert time[1].bubble < time[16].bubble


def test_the_plan_of_a_small_model_is_near_its_measured_step():
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    (measured,) = (
        row["step_s"]
        for row in rows
        if row["case"]["shape"] == "smollm2-135m"
        and row["case"]["kind"] == "dms"
        and row["case"]["cuda_graph"] == "auto"
    )
    size = {"data__seq_length": 2048, "data__global_batch_size": 32, "data__micro_batch_size": 16}
    planned = stages_of(configs.config(**size, **BF16), SMALL, 1)
    time = step_time(planned, GPUS["h100"], calibration()).total
    assert time == pytest.approx(measured, rel=0.15)
