"""Configuration of megatron-core for an architecture in a layout."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from dms_train.hf.architecture import Architecture
from dms_train.hf.rope import RopeScaling
from dms_train.mcore.errors import ModelError
from dms_train.mcore.layers.backend import activation
from dms_train.mcore.layers.experts import expert_options
from dms_train.mcore.options import VOCABULARY_MULTIPLE, ParallelOptions

_ROPE_RULE = (1.0, 4.0, 8192)  # low, high, original length: the only rule megatron-core supports

# Options of a layout that megatron-core's configuration has under the same name.
_SAME_OPTIONS = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "sequence_parallel",
    "tp_comm_overlap",
    "recompute_granularity",
)


def padded_vocab_size(architecture: Architecture) -> int:
    """Return the number of rows of the embedding table, padding included."""
    return -(-architecture.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def transformer_config(architecture: Architecture, options: ParallelOptions) -> TransformerConfig:
    """Make megatron-core's configuration of this architecture in this layout."""
    config = TransformerConfig(
        **_layers(architecture),
        **_layout(options),
        **expert_options(architecture, options),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        # layers without decisions have no adapters of eviction channels
        hetereogenous_dist_checkpoint=len(architecture.method_layers) < architecture.num_layers,
    )
    # megatron refuses biases of experts that ranks share, which `layers.experts` adds up
    config.add_bias_linear = architecture.described.linear_bias
    return config


def _layers(a: Architecture) -> dict[str, Any]:
    """Return the options of megatron-core's configuration that describe the layers."""
    return {
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        # with two widths megatron would copy this configuration, which may refer to process groups
        "ffn_hidden_size": a.ffn_hidden_size if a.experts is None else a.experts.ffn_hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "num_query_groups": a.num_query_groups,
        "kv_channels": a.kv_channels,
        "add_qkv_bias": a.add_qkv_bias,
        # makes megatron sum q and k norm gradients over the tensor-parallel group, also without
        # sequence parallelism; joint norms are sharded
        "qk_layernorm": a.qk_layernorm and not a.described.joint_qk_norm,
        "layernorm_epsilon": a.layernorm_epsilon,
        "layernorm_zero_centered_gamma": a.described.centered_norms,
        "softmax_scale": a.softmax_scale,
        "attention_output_gate": a.described.output_gate,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": activation(a.described),
    }


def _layout(options: ParallelOptions) -> dict[str, Any]:
    """Return the options of megatron-core's configuration that describe the layout."""
    dtype = torch.bfloat16 if options.params_dtype == "bf16" else torch.float32
    full = options.recompute_granularity == "full"
    interleaved = options.virtual_pipeline_model_parallel_size is not None
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": options.params_dtype == "bf16",
        **{name: getattr(options, name) for name in _SAME_OPTIONS},
        # The interleaved schedule may exchange two messages between the same two ranks at a time;
        # batched, they would be mixed up without an error.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # Transformer Engine casts weights to FP8 in every pass and keeps no copy between passes
        "disable_parameter_transpose_cache": options.fp8,
        "recompute_modules": list(options.recompute_modules),
        "recompute_method": "uniform" if full else None,
        "recompute_num_layers": options.recompute_num_layers if full else None,
    }


def rope_arguments(scaling: RopeScaling | None) -> dict[str, Any]:
    """Return RotaryEmbedding's scaling arguments; ModelError if megatron-core lacks the rule."""
    if scaling is None or scaling.rope_type == "yarn":
        return {}
    if scaling.rope_type == "linear":
        return {"seq_len_interpolation_factor": scaling.factor}
    rule = (
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_position_embeddings,
    )
    if rule != _ROPE_RULE:
        raise ModelError(
            f"model: llama3 RoPE scaling with (low, high, original length) = {rule}; "
            f"megatron-core supports {_ROPE_RULE} only; use a model with that rule"
        )
    return {"rope_scaling": True, "rope_scaling_factor": scaling.factor}
