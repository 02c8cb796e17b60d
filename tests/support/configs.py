"""Configurations and architectures for tests: valid ones, to be spoilt one value at a time."""

from __future__ import annotations

import copy
from typing import Any

from dms_train.config.build import build
from dms_train.config.schema import RunConfig
from dms_train.hf.architecture import Architecture

MAPPING: dict[str, Any] = {
    "model": {"path": "some/model"},
    "method": {"preset": "dms", "window": 16},
    "stage": {
        "run": ["zero_neuron", "retrofit", "export"],
        "pretrain": {"steps": 10},
        "zero_neuron": {"steps": 10},
        "retrofit": {"target_cr": 4, "steps_per_cr": 10},
        "hold": {"steps": 10},
        "export": {},
        "validate": {},
    },
    "data": {
        "paths": ["some/data"],
        "seq_length": 64,
        "micro_batch_size": 1,
        "global_batch_size": 8,
    },
    "parallel": {},
    "optim": {"lr": 1e-4},
    "observe": {},
    "run": {"dir": "outputs/test"},
}


def mapping(**changes: Any) -> dict[str, Any]:
    """A copy of `MAPPING`; `data__seq_length=3` replaces `data.seq_length`."""
    values = copy.deepcopy(MAPPING)
    for path, value in changes.items():
        *blocks, name = path.split("__")
        target = values
        for block in blocks:
            target = target[block]
        target[name] = value
    return values


def config(**changes: Any) -> RunConfig:
    return build(mapping(**changes))


def architecture(**changes: Any) -> Architecture:
    values: dict[str, Any] = {
        "family": "llama",
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "vocab_size": 512,
        "max_position_embeddings": 128,
        "rotary_base": 10000.0,
        "layernorm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    }
    return Architecture(**{**values, **changes})


# The models that conf/experiment speaks of, from their config.json files.
KNOWN = {
    "stories260k": architecture(
        num_layers=5,
        ffn_hidden_size=172,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=8,
        max_position_embeddings=512,
    ),
    "llama32_1b_cr4": architecture(
        num_layers=16,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=64,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "qwen_r1_7b_cr8": architecture(
        family="qwen2",
        num_layers=28,
        hidden_size=3584,
        ffn_hidden_size=18944,
        num_attention_heads=28,
        num_query_groups=4,
        kv_channels=128,
        vocab_size=152064,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    "qwen3_8b_nvidia": architecture(
        family="qwen3",
        num_layers=36,
        hidden_size=4096,
        ffn_hidden_size=12288,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    ),
    "llama2_7b_lm": architecture(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=11008,
        num_attention_heads=32,
        num_query_groups=32,
        kv_channels=128,
        vocab_size=32000,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    ),
}
