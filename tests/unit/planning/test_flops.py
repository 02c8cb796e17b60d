"""Model FLOPs, against products counted one by one and the rule of six."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dms_train.families import LayerAttention
from dms_train.mcore.options import Trainable
from dms_train.method.spec import PRESETS
from dms_train.observe.metrics import Compute
from dms_train.planning.flops import forward_flops_per_token, mean_keys, student_flops_per_token
from dms_train.planning.parameters import parameter_count
from tests.support import configs


def test_products_counted_one_by_one():
    a, length = configs.architecture(), 8
    hidden, ffn, head = 64, 128, 16
    projections = hidden * (4 * head) + 2 * hidden * (2 * head) + (4 * head) * hidden
    layer = projections + 3 * hidden * ffn
    scores = sum(query + 1 for query in range(length)) * 4 * head / length  # pairs a token
    forward = 2 * (4 * (layer + 2 * scores) + 512 * hidden)
    assert forward_flops_per_token(a, length) == pytest.approx(forward)


@pytest.mark.parametrize("window", [1, 3, 8, 100])
def test_a_layer_with_a_window_reads_the_keys_in_it(window):
    whole = LayerAttention(rotary_base=10000.0)
    a = configs.architecture(layers=(whole, replace(whole, window=window)) * 2)
    keys = [query + 1 for query in range(8)]
    pairs = (sum(keys) + sum(min(count, window) for count in keys)) / 2
    assert mean_keys(a, 8) == pytest.approx(pairs / 8)


@pytest.mark.parametrize("name", ["llama2_7b", "llama31_8b", "qwen3_32b"])
def test_short_texts_cost_two_operations_a_weight_and_pass(name):
    a = configs.KNOWN[name]
    multiplied = parameter_count(a) - a.vocab_size * a.hidden_size  # the embedding is looked up
    assert forward_flops_per_token(a, 1) == pytest.approx(2 * multiplied, rel=1e-3)


def test_utilization():
    compute = Compute(forward_flops=2e9, student_flops=6e9, devices=4, peak_tflops=10.0)
    # 1000 tokens/s, three passes of 2 GFLOP: 6 TFLOP/s on 4 devices
    assert compute.at(1000.0, has_teacher=False) == pytest.approx(
        {"tflops_per_device": 1.5, "mfu": 0.15}
    )
    assert compute.at(1000.0, has_teacher=True)["mfu"] == pytest.approx(0.2)
    unknown = Compute(forward_flops=2e9, student_flops=6e9, devices=4)
    assert unknown.at(1000.0, has_teacher=False) == pytest.approx({"tflops_per_device": 1.5})


def test_frozen_weights_save_their_gradients():
    """Without attention over other tokens: 6 operations per weight that trains, 4 per frozen."""
    a, method = configs.KNOWN["llama31_8b"], PRESETS["dms"]
    weights = parameter_count(a) - a.vocab_size * a.hidden_size
    attention = a.num_layers * 2 * 4096 * (4096 + 1024)
    lora = a.num_layers * (16 * (4 * 4096 + 4096 + 2 * 1024 + 4096) + 8 * 4096)
    expected = {
        "all": 6 * weights,
        "attention": 4 * weights + 2 * attention,
        "lora": 4 * weights + 6 * lora,
    }
    for train, operations in expected.items():
        counted = student_flops_per_token(a, 1, Trainable(weights=train), method)
        assert counted == pytest.approx(operations, rel=1e-3)
