"""Parameters of published models."""

from __future__ import annotations

import pytest

from dms_train.hf.experts import Experts
from dms_train.planning.parameters import active_parameter_count, parameter_count
from tests.support import configs


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama32_1b", 1_235_814_400),
        ("llama2_7b", 6_738_415_616),
        ("llama31_8b", 8_030_261_248),
        ("mistral_7b", 7_248_023_552),
        ("qwen_r1_1_5b", 1_777_088_000),
        ("qwen_r1_7b", 7_615_616_512),
        ("qwen_r1_32b", 32_763_876_352),
        ("qwen3_0_6b", 596_049_920),
        ("qwen3_1_7b", 1_720_574_976),
        ("qwen3_4b", 4_022_468_096),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_14b", 14_768_307_200),
        ("qwen3_32b", 32_762_123_264),
    ],
)
def test_parameters_of_known_models(name, parameters):
    assert parameter_count(configs.KNOWN[name]) == parameters


def test_parameters_of_a_model_with_experts():
    """Qwen3-30B-A3B, as published: 30.5 billion parameters, 3.3 billion of them active."""
    a = configs.architecture(
        **{"family": "qwen3_moe", "num_layers": 48, "hidden_size": 2048, "kv_channels": 128},
        **{"num_attention_heads": 32, "num_query_groups": 4, "vocab_size": 151936},
        tie_word_embeddings=False,
        experts=Experts(count=128, topk=8, ffn_hidden_size=768, normalize=True),
    )
    assert parameter_count(a) == 30_532_122_624
    assert active_parameter_count(a) == pytest.approx(3.3e9, rel=0.02)
