"""Names and shapes of the weights of a Hugging Face model directory."""

from __future__ import annotations

from dms_train.hf.architecture import Architecture

Shape = tuple[int, ...]


def _layer_shapes(a: Architecture) -> dict[str, Shape]:
    query, key = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    shapes: dict[str, Shape] = {
        "self_attn.q_proj.weight": (query, a.hidden_size),
        "self_attn.k_proj.weight": (key, a.hidden_size),
        "self_attn.v_proj.weight": (key, a.hidden_size),
        "self_attn.o_proj.weight": (a.hidden_size, query),
        "mlp.gate_proj.weight": (a.ffn_hidden_size, a.hidden_size),
        "mlp.up_proj.weight": (a.ffn_hidden_size, a.hidden_size),
        "mlp.down_proj.weight": (a.hidden_size, a.ffn_hidden_size),
        "input_layernorm.weight": (a.hidden_size,),
        "post_attention_layernorm.weight": (a.hidden_size,),
    }
    if a.add_qkv_bias:
        biases = {"q_proj": query, "k_proj": key, "v_proj": key}
        shapes.update({f"self_attn.{name}.bias": (size,) for name, size in biases.items()})
    if a.qk_layernorm:
        shapes.update({f"self_attn.{n}_norm.weight": (a.kv_channels,) for n in "qk"})
    return shapes


def expected_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Every tensor such a model's directory holds, in file order.

    Tied models have no `lm_head.weight`. DMS adds no tensors.
    """
    a = architecture
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for layer in range(a.num_layers):
        shapes.update({f"model.layers.{layer}.{n}": s for n, s in _layer_shapes(a).items()})
    shapes["model.norm.weight"] = (a.hidden_size,)
    if not a.tie_word_embeddings:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    return shapes
