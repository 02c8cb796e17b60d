"""Configurations and architectures for tests: valid ones, of which a test changes single values."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

from dms_train.cli.config_source import CONF_DIR
from dms_train.config.build import build
from dms_train.config.resolve import resolved
from dms_train.config.schema import RunConfig
from dms_train.families import LayerAttention
from dms_train.hf.architecture import Architecture
from dms_train.method.spec import PRESETS
from tests.support.experts import experts_of
from tests.support.plain_delta import sizes_of

MAPPING: dict[str, Any] = {
    "model": {"path": "some/model"},
    "method": {**asdict(PRESETS["dms"]), "window": 16},
    "stage": {
        "run": ["zero_neuron", "retrofit", "export"],
        "pretrain": {"steps": 10},
        "zero_neuron": {"steps": 10},
        "retrofit": {"target_cr": 4, "steps_per_cr": 10},
        "hold": {"steps": 10},
        "export": {},
        "validate_export": {},
    },
    "data": {
        "paths": ["some/data"],
        "seq_length": 64,
        "micro_batch_size": 1,
        "global_batch_size": 8,
    },
    "parallel": {},
    "loss": {},
    "teacher": {},
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
    return resolved(build(mapping(**changes)))


def architecture(*, kinds: str = "lf", **changes: Any) -> Architecture:
    """A model of the family; `kinds` repeats: linear or full attention, where a family has both."""
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
    values["experts"] = experts_of(changes.get("family", "llama"))
    values["linear"] = sizes_of(changes.get("family", "llama"))
    if values["linear"] is not None:
        full, linear = (
            LayerAttention(rotary_base=1e4),
            LayerAttention(rotary_base=None, linear=True),
        )
        layers = [full if kind == "f" else linear for kind in kinds]
        count = changes.get("num_layers", values["num_layers"])
        values["layers"] = tuple(layers * (count // len(layers)))
    return Architecture(**{**values, **changes})


# The models that conf/experiment names, from their config.json files.
_LLAMA = {"kv_channels": 128, "num_attention_heads": 32, "tie_word_embeddings": False}
_QWEN2 = {
    "family": "qwen2",
    "kv_channels": 128,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_QWEN3 = {
    "family": "qwen3",
    "num_query_groups": 8,
    "kv_channels": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def _sized(common: dict[str, Any], layers: int, hidden: int, ffn: int, **rest: Any) -> Architecture:
    sizes = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn}
    return architecture(**{**common, **sizes, **rest})


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, *, tied: bool = False) -> Architecture:
    heads_and_tie = {"num_attention_heads": heads, "tie_word_embeddings": tied}
    return _sized(_QWEN3, layers, hidden, ffn, **heads_and_tie)


def _qwen2(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, **rest: Any
) -> Architecture:
    return _sized(
        {**_QWEN2, "num_attention_heads": heads, "num_query_groups": groups},
        layers,
        hidden,
        ffn,
        **rest,
    )


KNOWN = {
    "stories260k": architecture(
        num_layers=5,
        ffn_hidden_size=172,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=8,
        max_position_embeddings=512,
    ),
    "llama32_1b": architecture(
        num_layers=16,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=64,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "llama2_7b": _sized(
        _LLAMA,
        32,
        4096,
        11008,
        num_query_groups=32,
        vocab_size=32000,
        max_position_embeddings=4096,
    ),
    "llama31_8b": _sized(
        _LLAMA,
        32,
        4096,
        14336,
        num_query_groups=8,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "mistral_7b": _sized(
        {**_LLAMA, "family": "mistral"},
        32,
        4096,
        14336,
        num_query_groups=8,
        vocab_size=32768,
        max_position_embeddings=32768,
    ),
    "smollm2_135m": _sized(
        {},
        30,
        576,
        1536,
        num_attention_heads=9,
        num_query_groups=3,
        kv_channels=64,
        vocab_size=49152,
        max_position_embeddings=8192,
    ),
    "qwen25_coder_0_5b": _qwen2(
        *(24, 896, 4864, 14, 2),
        kv_channels=64,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "qwen_r1_1_5b": _qwen2(28, 1536, 8960, 12, 2, vocab_size=151936),
    "qwen_r1_7b": _qwen2(28, 3584, 18944, 28, 4),
    "qwen_r1_32b": _qwen2(64, 5120, 27648, 40, 8),
    "qwen3_0_6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3_1_7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3_4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3_8b": _qwen3(36, 4096, 12288, 32),
    "qwen3_14b": _qwen3(40, 5120, 17408, 40),
    "qwen3_32b": _qwen3(64, 5120, 25600, 64),
}
KNOWN["qwen3_8b_nvidia"] = KNOWN["qwen3_8b"]
KNOWN["paper"] = KNOWN["llama31_8b"]


def layouts(experiment: str) -> list[tuple[int, str]]:
    """Device counts and `parallel=` choices that an experiment file states, its own first."""
    text = (CONF_DIR / "experiment" / f"{experiment}.yaml").read_text()
    stated = text.partition("# layouts: ")[2].splitlines()[0].split(", ")
    return [(int(count), name) for count, name in (item.split(" ") for item in stated)]


def model_experiments() -> list[str]:
    """The experiments that state layouts: one for each model."""
    files = sorted((CONF_DIR / "experiment").glob("*.yaml"))
    return [file.stem for file in files if "# layouts: " in file.read_text()]
