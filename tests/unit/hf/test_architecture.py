"""config.json, read and written, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from dms_train.families import FAMILIES, LayerAttention
from dms_train.hf.config_json import from_hf_config, to_hf_config
from dms_train.hf.errors import HFError
from dms_train.hf.json_files import read_config
from dms_train.hf.rope import RopeScaling
from dms_train.hf.tensors import expected_shapes
from tests.support.plain_delta import sizes_of

SIZES = sizes_of("qwen3_5_text")


def native(family, **values):
    """Transformers' own config object."""
    import transformers

    return getattr(transformers, FAMILIES[family].config_class)(**values)


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(architecture, family):
    a = architecture(family)
    assert from_hf_config(to_hf_config(a)) == a


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_through_transformers(architecture, family):
    a = architecture(family)
    values = to_hf_config(a)
    values.pop("model_type")
    config = native(family, **values)
    assert from_hf_config(config.to_dict()) == a
    assert from_hf_config(config.to_diff_dict()) == a


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dropped", [["rope_parameters"], ["rope_theta", "rope_scaling"]])
def test_either_spelling_is_enough(architecture, family, dropped):
    a = architecture(family)
    values = to_hf_config(a)
    for key in dropped:
        del values[key]
    assert from_hf_config(values) == a


def test_wide_heads_in_qwen2(architecture):
    a = dataclasses.replace(architecture("qwen2"), kv_channels=16)
    assert from_hf_config(to_hf_config(a)) == a


def test_exports_are_read_too(architecture):
    values = {**to_hf_config(architecture("qwen3")), "model_type": "dms_qwen3"}
    assert from_hf_config(values) == architecture("qwen3")


def test_published_configs():
    """The keys that matter of Llama-3.2-1B and Qwen3-0.6B as published."""
    llama = {
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    }
    assert from_hf_config(llama).rope_scaling == RopeScaling(factor=32.0)
    assert from_hf_config({**llama, "head_dim": None}).kv_channels == 64
    qwen = {
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    read = from_hf_config(qwen)
    assert read.kv_channels == 128  # transformers' default for qwen3, not hidden / heads
    assert read.layernorm_epsilon == 1e-6


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
OLMO3_7B = {
    "model_type": "olmo3",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        **YARN,
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 100278,
}


def ropes(full: dict[str, object]) -> dict[str, object]:
    """Keys of RoPE with this rule in the layers without a window."""
    return {
        "rope_scaling": None,
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_theta": 1e4}},
    }


def test_published_olmo_3():
    """The keys of the 7B model as published."""
    read = from_hf_config(OLMO3_7B)
    assert read.method_layers == [3, 7, 11, 15, 19, 23, 27, 31]
    assert read.rope_scaling == RopeScaling(
        rope_type="yarn",
        factor=8.0,
        original_max_position_embeddings=8192,
        attention_factor=0.1 * math.log(8) + 1,
    )
    local, scaled = read.ropes[2:4]
    assert (local.base, local.scaling) == (500000.0, None)
    assert (scaled.base, scaled.scaling) == (500000.0, read.rope_scaling)
    assert sum(math.prod(shape) for shape in expected_shapes(read).values()) == 7_298_011_136
    fewer = {**OLMO3_7B, "rope_scaling": YARN}  # transformers derives the others
    del fewer["layer_types"]
    assert from_hf_config(fewer) == read
    assert from_hf_config(to_hf_config(read)) == read


GEMMA3_270M = {
    "model_type": "gemma3_text",
    "_sliding_window_pattern": 6,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": False,
    "vocab_size": 262144,
}


def test_published_gemma_3():
    """The keys of the 270M model as published, and those by which larger models differ."""
    read = from_hf_config(GEMMA3_270M)
    assert read.method_layers == [5, 11, 17]
    assert read.layers[0] == LayerAttention(rotary_base=10000.0, window=512)
    assert read.layers[5] == LayerAttention(rotary_base=1000000.0)
    assert sum(math.prod(shape) for shape in expected_shapes(read).values()) == 268_098_176
    older = {**GEMMA3_270M, "sliding_window_pattern": 6}  # without the types of the layers
    del older["layer_types"]
    assert from_hf_config(older) == read
    sizes = {"head_dim": 128, "query_pre_attn_scalar": 168}
    large = {**GEMMA3_270M, **sizes, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    read = from_hf_config(large)
    assert read.rope_scaling == RopeScaling(factor=8.0, rope_type="linear")
    assert read.softmax_scale == pytest.approx(168**-0.5)
    assert from_hf_config(to_hf_config(read)) == read


def test_published_mistral():
    """The keys of Mistral-7B-v0.3, and of the window that v0.1 has, as published."""
    mistral = {
        "architectures": ["MistralForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32768,
    }
    read = from_hf_config(mistral)
    assert (read.kv_channels, read.rotary_base, read.tie_word_embeddings) == (128, 1e6, False)
    assert from_hf_config(to_hf_config(read)) == read  # the config states that there is no window
    assert from_hf_config({**mistral, "head_dim": 160}).kv_channels == 160
    assert from_hf_config({**mistral, "sliding_window": 32768}) == read  # never leaves the window
    windowed = {**mistral, "sliding_window": 4096}
    with pytest.raises(HFError, match="sliding_window=4096"):
        from_hf_config(windowed)
    del windowed["sliding_window"]  # transformers' default is 4096
    with pytest.raises(HFError, match="sliding_window=4096"):
        from_hf_config(windowed)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_layers_with_a_window(architecture, family):
    values = {**to_hf_config(architecture(family)), "sliding_window": 24}
    assert from_hf_config(values) == architecture(family)  # use_sliding_window is false
    values |= {"use_sliding_window": True, "max_window_layers": 1}
    read = from_hf_config(values)
    assert [layer.window for layer in read.attention_layers] == [None, 24]
    assert read.method_layers == [0]
    written = to_hf_config(read)
    assert from_hf_config(written) == read
    kinds = native(family, **{k: v for k, v in values.items() if k != "model_type"}).layer_types
    assert written["layer_types"] == kinds
    values |= {"max_window_layers": 0, "layer_types": kinds}  # transformers reads the second
    assert from_hf_config(values) == read


def test_a_window_of_the_longest_sequence_is_none(architecture):
    values = {**to_hf_config(architecture("qwen2")), "use_sliding_window": True}
    longest = values["max_position_embeddings"]
    for kinds in (["full_attention", "sliding_attention"], ["sliding_attention"] * 2):
        given = {**values, "layer_types": kinds, "sliding_window": longest}
        assert from_hf_config(given) == architecture("qwen2")
    assert from_hf_config({**given, "layer_types": None, "max_window_layers": 1}).layers == ()


def test_layers_of_smollm3_without_rope(architecture):
    """As transformers reads them: the keys of SmolLM3-3B, of a stated interval, and of no layer."""
    values = {**to_hf_config(architecture("smollm3")), "num_hidden_layers": 8}
    del values["no_rope_layers"]
    for given in ({}, {"no_rope_layer_interval": 3}, {"no_rope_layers": [1] * 9}):
        stated = native("smollm3", **{**values, **given}).no_rope_layers[:8]
        read = from_hf_config({**values, **given})
        assert [int(layer.rotary_base is not None) for layer in read.attention_layers] == stated
    assert read.layers == ()  # as in a model without the key


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers": (LayerAttention(rotary_base=None),)}, "describes 1 layers, num_layers=2"),
        ({"family": "llama"}, "layers of llama models are alike"),
        (
            {
                "layers": (
                    LayerAttention(rotary_base=1e6),
                    LayerAttention(rotary_base=1e6, window=4),
                )
            },
            "smollm3 models have no windows",
        ),
        ({"rotary_base": 5.0}, r"layers\[1\].rotary_base=1000000.0: use null or rotary_base=5.0"),
    ],
)
def test_layers_that_no_model_can_have(architecture, changes, named):
    (line,) = dataclasses.replace(architecture("smollm3"), **changes).check("model")
    assert re.search(named, line)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"layers": (LayerAttention(rotary_base=5.0), LayerAttention(rotary_base=1e6))},
            "use rotary_base=1000000.0 in layers without a window",
        ),
        (
            {
                "layers": (
                    LayerAttention(rotary_base=None, window=4),
                    LayerAttention(rotary_base=1e6),
                )
            },
            "one rotary_base in the layers with a window",
        ),
        ({"rope_scaling": RopeScaling(factor=8.0)}, "rope_type=llama3: .*is linear"),
    ],
)
def test_ropes_that_no_gemma_3_can_have(architecture, changes, named):
    (line,) = dataclasses.replace(architecture("gemma3_text"), **changes).check("model")
    assert re.search(named, line)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen3_5_text", {"linear": None}, "model.linear: does not fit family=.*; state it"),
        ("qwen2", {"linear": SIZES}, "model.linear: does not fit family=qwen2; set it to null"),
        (
            "qwen3_5_text",
            {"layers": (LayerAttention(rotary_base=1e6, linear=True),) * 2},
            "no layer reads all tokens",
        ),
        (
            "qwen3_5_text",
            {
                "layers": (
                    LayerAttention(rotary_base=1e6, linear=True),
                    LayerAttention(rotary_base=1e6),
                )
            },
            r"layers\[0\].linear=true: leave out rotary_base and window",
        ),
    ],
)
def test_linear_attention_that_no_model_can_have(architecture, family, changes, named):
    line, *_ = dataclasses.replace(architecture(family), **changes).check("model")
    assert re.search(named, line)


def test_sizes_of_linear_attention_that_no_model_can_have():
    wrong = dataclasses.replace(SIZES, key_heads=3, taps=0)
    assert list(wrong.check("model.linear")) == [
        "model.linear.taps=0: use a number above 0",
        "model.linear.key_heads=3: does not divide value_heads=4; use a divisor of it",
    ]


def test_a_softmax_scale_that_the_family_has_not_is_refused(architecture):
    (line,) = dataclasses.replace(architecture("qwen2"), query_scalar=9).check("model")
    assert line.startswith("model.query_scalar=9: qwen2 models scale by the head size")


@pytest.mark.parametrize(
    ("family", "factor", "named"),
    [
        ("qwen2", 0.5, "RoPE of qwen2 models rotates whole heads"),
        ("phi3", 0.4, "rotates 3 of 8 channels"),
        ("phi3", 1.25, "rotates 10 of 8 channels"),
    ],
)
def test_shares_of_a_head_that_rope_cannot_rotate(architecture, family, factor, named):
    changed = dataclasses.replace(architecture(family), partial_rotary_factor=factor)
    (line,) = changed.check("model")
    assert line.startswith(f"model.partial_rotary_factor={factor}: {named}")


def test_a_router_that_does_not_train_is_refused(architecture):
    moe = architecture("qwen3_moe")
    changed = dataclasses.replace(moe.experts, topk=1)
    (line,) = dataclasses.replace(moe, experts=changed).check("model")
    assert line.startswith("model.experts.topk=1: the router has no effect on training")


def test_stories(stories):
    read = from_hf_config(read_config(stories))
    assert (read.family, read.num_query_groups, read.kv_channels) == ("llama", 4, 8)


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", {"model_type": "gpt2"}, "model_type"),
        ("llama", {"model_type": None}, "model_type"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"rope_theta": 5.0}, "rope_theta"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters says"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "max_window_layers=0"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window='yes'"),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "2 layers"),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention"] * 2,
            },
            "layers that read all tokens",
        ),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ("qwen2", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ("qwen3", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ("qwen3", {"rope_scaling": {"type": "llama3", "factor": 4.0}}, "llama3"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "at most the number of experts, 4"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "no effect on training"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size=0"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\].*each of 2 layers"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "a list of 1"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "above 0"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window"),
        ("gemma3_text", {"model_type": "gemma3"}, "model_type='gemma3'"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation='silu'"),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 2}, "layers that read all tokens"),
        ("gemma3_text", {"layer_types": None}, "layers that read all tokens"),  # 2 of 6
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window=null"),
        ("gemma3_text", {"rope_local_base_freq": 5.0}, "rope_parameters says 10000.0"),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "linear", "rope_theta": 1e4},
                }
            },
            "rope_type='linear'",
        ),
        ("gemma3_text", {"rope_parameters": None, "rope_local_base_freq": 0}, "number above 0"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 2}, "layers of full attention"),
        ("qwen3_5_text", {"layer_types": None}, "layers of full attention"),  # 2 of 4
        ("qwen3_5_text", {"layer_types": ["full_attention"]}, "one type for each of 2 layers"),
        ("qwen3_5_text", {"layer_types": None, "full_attention_interval": 0}, "above 0"),
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "a divisor of linear_num_value_heads=4"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0"),
        ("qwen3_5_text", {"model_type": "qwen3_5_moe_text"}, "experts of Qwen3.5"),
        ("glm4", {"attention_bias": False}, "attention_bias=False"),
        ("phi3", {"partial_rotary_factor": 0.75}, "RoPE says 0.5; make them agree"),
        ("phi3", {"rope_parameters": None, "partial_rotary_factor": 0.4}, "rotates 3 of 8"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "longrope"),
        ("phi3", {"sliding_window": 255}, "sliding_window=255 .*max_position_embeddings=256"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1"),
        ("olmo3", {"layer_types": ["sliding_attention"] * 2}, "layers that read all tokens"),
        ("olmo3", {"layer_types": None}, "layers that read all tokens"),  # 2 of 4
        ("olmo3", {"sliding_window": None}, "sliding_window=null"),
        ("olmo3", {"rope_parameters": None, "rope_theta": 1e6}, "state rope_theta of sliding"),
        ("olmo3", ropes({**YARN, "truncate": "no"}), "truncate"),
        ("gpt_oss", {"layer_types": ["sliding_attention"] * 2}, "layers that read all tokens"),
        ("gpt_oss", {"rope_parameters": None, "rope_scaling": None}, "state the RoPE"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias=False"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ("olmo3", ropes({**YARN, "beta_fast": 1}), "beta_fast"),
        ("olmo3", ropes({**YARN, "mscale": 2.0}), "mscale=2.0"),
        ("olmo3", ropes({"rope_type": "yarn"}), "also needs factor"),
        ("olmo3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}}, "yarn"),
        ("mistral", {"sliding_window": 255}, "sliding_window=255 .*max_position_embeddings=256"),
        ("mistral", {"sliding_window": "all"}, "sliding_window='all'"),
        ("mistral", {"rope_scaling": {"type": "llama3", "factor": 4.0}}, "llama3"),
        (
            "qwen3",
            {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
    ],
)
def test_refusals(architecture, family, change, named):
    values = {**to_hf_config(architecture(family)), **change}
    with pytest.raises(ValueError, match=named) as error:
        from_hf_config(values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["hidden_size", "num_key_value_heads", "vocab_size"])
def test_missing_keys(architecture, key):
    values = to_hf_config(architecture("qwen3"))
    del values[key]
    with pytest.raises(ValueError, match=key):
        from_hf_config(values)


def test_incomplete_llama3_scaling(architecture):
    values = to_hf_config(architecture("llama"))
    values["rope_scaling"] = {"rope_type": "llama3", "factor": 8.0}
    del values["rope_parameters"]
    with pytest.raises(ValueError, match="low_freq_factor"):
        from_hf_config(values)
