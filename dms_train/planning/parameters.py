"""Weights of a model, of a layer on a rank, and those multiplied with every token."""

from __future__ import annotations

from dms_train.hf.architecture import Architecture


def parameter_count(architecture: Architecture) -> int:
    """Count the parameters of the model, a tied output projection once."""
    a = architecture
    embeddings = a.vocab_size * a.hidden_size * (1 if a.tie_word_embeddings else 2)
    attending = len(a.cache_layers)
    layers = attending * attention_layer_weights(a) + a.num_layers * expert_weights(a)
    layers += (a.num_layers - attending) * linear_layer_weights(a)
    return layers + embeddings + a.hidden_size


def active_parameter_count(architecture: Architecture) -> int:
    """Count the parameters that a token uses: of the experts, those that it passes through."""
    a = architecture
    unused = 0 if a.experts is None else a.experts.count - a.experts.topk
    return parameter_count(a) - a.num_layers * unused * _expert(a)


def layer_products(a: Architecture) -> float:
    """Count the weights of one layer that are multiplied with every token; the mean of all layers.

    Linear attention multiplies states by keys, values and queries in place of attention's products.
    """
    experts = 0 if a.experts is None else a.experts.topk * _expert_products(a)
    common = experts + a.num_experts * a.hidden_size
    if a.linear is None:
        return _matrices(a) + common
    states = 3 * a.linear.values * a.linear.key_channels
    linear = _linear_matrices(a) + states
    share = len(a.cache_layers) / a.num_layers
    return share * _matrices(a) + (1 - share) * linear + common


def attention_layer_weights(a: Architecture, tp: int = 1) -> int:
    """Count the weights of one layer on a tensor-parallel rank, without experts."""
    return _sharded(a) // tp + _replicated(a)


def linear_layer_weights(a: Architecture, tp: int = 1) -> int:
    """Count what `attention_layer_weights` counts, for a layer with linear attention."""
    return _linear_sharded(a) // tp + _linear_replicated(a)


def expert_weights(a: Architecture) -> int:
    """Count the weights of all experts of one layer."""
    return a.num_experts * _expert(a)


def _expert(a: Architecture) -> int:
    """Count the weights of one expert."""
    biases = 0
    if a.experts is not None and a.described.linear_bias:
        biases = 2 * a.experts.ffn_hidden_size + a.hidden_size
    return _expert_products(a) + biases


def _expert_products(a: Architecture) -> int:
    """Count the weights of one expert that are multiplied with its tokens."""
    return 0 if a.experts is None else 3 * a.hidden_size * a.experts.ffn_hidden_size


def _matrices(a: Architecture) -> int:
    """Count the weights of the projections of attention, and of the MLP where there is one."""
    query, key = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    gate = query if a.described.output_gate else 0
    return a.hidden_size * (2 * (query + key) + gate) + mlp_products(a)


def _linear_matrices(a: Architecture) -> int:
    """Count the weights of the projections of linear attention, and of the MLP."""
    if a.linear is None:
        return 0
    rows = a.linear.key_heads * sum(a.linear.group_rows)
    return a.hidden_size * (rows + a.linear.values) + mlp_products(a)


def _linear_sharded(a: Architecture) -> int:
    """Count what `_sharded` counts, for a layer with linear attention."""
    if a.linear is None:
        return 0
    taps = (2 * a.linear.keys + a.linear.values) * a.linear.taps
    return _linear_matrices(a) + taps + 2 * a.linear.value_heads


def _linear_replicated(a: Architecture) -> int:
    """Count what `_replicated` counts, for a layer with linear attention."""
    if a.linear is None:
        return 0
    return _outer_norms(a) + a.linear.value_channels + _gates(a)


def _gates(a: Architecture) -> int:
    """Count the weights of the router, and of the gate of a shared expert."""
    return (a.num_experts + a.described.shares_expert) * a.hidden_size


def _outer_norms(a: Architecture) -> int:
    """Count the weights of the norms around attention and MLP."""
    return 2 * (a.described.sandwich_norms + a.described.input_norms) * a.hidden_size


def mlp_products(a: Architecture) -> int:
    """Count the weights of the MLP of one layer, or of the expert that all tokens share."""
    width = a.ffn_hidden_size if a.experts is None else a.experts.shared_ffn_hidden_size
    return 3 * a.hidden_size * width


def _sharded(a: Architecture) -> int:
    """Count the weights of one layer that tensor parallelism divides, without experts."""
    query, key = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    norms = query + key if a.described.joint_qk_norm else 0
    sinks = a.num_attention_heads if a.described.sinks else 0
    return _matrices(a) + norms + sinks + (query + 2 * key if a.add_qkv_bias else 0)


def _replicated(a: Architecture) -> int:
    """Count the weights of one layer that tensor parallelism does not divide, without experts."""
    family = a.described
    per_head = a.qk_layernorm and not family.joint_qk_norm
    norms = _outer_norms(a) + (2 * a.kv_channels if per_head else 0)
    biases = a.hidden_size + a.num_experts if family.linear_bias else 0
    return norms + _gates(a) + biases
