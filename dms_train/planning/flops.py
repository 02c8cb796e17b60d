"""Floating-point operations of training, by the convention of model FLOPs.

The count holds the matrix products of the model's definition, with two operations for each
multiplication and addition: projections, the vocabulary projection, and causal attention over all
keys at or before the query. It leaves out embeddings, norms, recomputed layers and eviction.
"""

from __future__ import annotations

from dms_train.hf.architecture import Architecture
from dms_train.planning.memory import layer_products


def forward_flops_per_token(architecture: Architecture, seq_length: int) -> float:
    """Return the operations of one forward pass per token of samples of `seq_length` tokens."""
    a = architecture
    weights = a.num_layers * layer_products(a) + a.vocab_size * a.hidden_size
    keys = (seq_length + 1) / 2  # mean over the queries of a sample
    # q k^T and the weighted sum of values
    attention = a.num_layers * 2 * a.num_attention_heads * a.kv_channels * keys
    return 2 * (weights + attention)
