"""Floating-point operations of training, by the convention of model FLOPs.

The count holds the matrix products of the model's definition, with two operations for each
multiplication and addition: projections, the vocabulary projection, and causal attention over all
keys at or before the query. A layer with a window counts the keys in the window only, and linear
attention the products of a head's state with a key, a value and a query. The count
leaves out embeddings, norms, recomputed layers and eviction.
"""

from __future__ import annotations

from dms_train.hf.architecture import Architecture
from dms_train.mcore.options import Trainable
from dms_train.method.base import MethodSpec
from dms_train.planning.parameters import layer_products
from dms_train.planning.trained import adapters, attention_weights


def forward_flops_per_token(architecture: Architecture, seq_length: int) -> float:
    """Return the operations of one forward pass per token of samples of `seq_length` tokens."""
    a = architecture
    weights = a.num_layers * layer_products(a) + a.vocab_size * a.hidden_size
    # q k^T and the weighted sum of values
    heads = a.num_attention_heads * a.kv_channels
    attention = a.num_layers * 2 * heads * mean_keys(a, seq_length)
    return 2 * (weights + attention)


def mean_keys(architecture: Architecture, length: int) -> float:
    """Return the mean number of keys of a query over all layers and a sample of `length` tokens."""
    spans = [
        0 if layer.linear else min(layer.window or length, length)
        for layer in architecture.attention_layers
    ]
    # query i, counted from 1, reads min(i, span) keys
    return sum(span * (length - (span - 1) / 2) for span in spans) / (length * len(spans))


def trained_products(architecture: Architecture, trainable: Trainable, layers: int) -> float:
    """Count the multiplied weights of `layers` layers whose gradients are computed.

    `layers` layers have the same share of linear attention as the model.
    """
    a = architecture
    if trainable.weights == "all":
        return layers * layer_products(a)
    attending = layers * len(a.cache_layers) / a.num_layers
    return attending * attention_weights(a) if trainable.weights == "attention" else 0


def student_flops_per_token(
    architecture: Architecture, seq_length: int, trainable: Trainable, method: MethodSpec
) -> float:
    """Return the operations of the student's forward and backward pass per token.

    Three forward passes, without the gradients of frozen weights and with adapters.
    """
    a = architecture
    forward = forward_flops_per_token(a, seq_length)
    if trainable.weights == "all":
        return 3 * forward
    weights = a.num_layers * layer_products(a) + a.vocab_size * a.hidden_size
    frozen = weights - trained_products(a, trainable, a.num_layers)
    count = adapters(a, trainable, method)
    added = count.parameters(len(a.cache_layers), len(a.method_layers))
    return 3 * forward - 2 * frozen + 3 * 2 * added
