"""Weights whose products run in FP8 (`mcore.layers.fp8`), and what they cost and save.

A model with experts has none (`planning.check`).
"""

from __future__ import annotations

from dms_train.hf.architecture import Architecture

# Speed of a product in FP8 over one in bf16, casts included; docs/scale.md has the measurement.
SPEEDUP = 1.6
# Bytes of a weight in FP8 that a layer keeps for its backward pass: rows and columns.
WEIGHT_BYTES = 2


def mlp_weights(a: Architecture) -> int:
    """Count the weights of an MLP."""
    return 3 * a.hidden_size * a.ffn_hidden_size


def output_weights(a: Architecture) -> int:
    """Count the weights of an output projection of attention."""
    return a.hidden_size * a.num_attention_heads * a.kv_channels


def linear_output_weights(a: Architecture) -> int:
    """Count the weights of an output projection of linear attention."""
    return 0 if a.linear is None else a.hidden_size * a.linear.values


def mean_output_weights(a: Architecture) -> float:
    """Count the weights of an output projection; the mean of all layers."""
    share = len(a.cache_layers) / a.num_layers
    return share * output_weights(a) + (1 - share) * linear_output_weights(a)
