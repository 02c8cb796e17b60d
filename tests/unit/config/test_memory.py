"""Memory estimates against numbers worked out by hand."""

from __future__ import annotations

import pytest

from dms_train.config.memory import estimate, parameter_count
from tests.support import configs


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama32_1b_cr4", 1_235_814_400),
        ("llama2_7b_lm", 6_738_415_616),
        ("qwen_r1_7b_cr8", 7_615_616_512),
        ("qwen3_8b_nvidia", 8_190_735_360),
    ],
)
def test_parameters_of_known_models(name, parameters):
    assert parameter_count(configs.KNOWN[name]) == parameters


def test_bytes_per_parameter():
    memory = estimate(configs.config(), configs.architecture(), 1)
    parameters = memory.weights // 4
    assert parameters == parameter_count(configs.architecture())
    assert (memory.gradients, memory.optimizer) == (4 * parameters, 8 * parameters)
    assert memory.teacher == memory.weights
    assert memory.logits == 3 * 64 * 512 * 4  # student, teacher and the student's gradient


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


def test_tensor_and_pipeline_shares():
    whole = estimate(configs.config(), configs.architecture(), 1).weights
    halves = configs.config(parallel__tensor_model_parallel_size=2)
    assert estimate(halves, configs.architecture(), 2).weights == pytest.approx(whole / 2, rel=0.01)
    stages = configs.config(parallel__pipeline_model_parallel_size=2)
    assert whole / 2 < estimate(stages, configs.architecture(), 2).weights < whole
