"""Names and shapes of the weights of a Hugging Face model directory."""

from __future__ import annotations

from dms_train.families.decoder.tensors import layer_tensors
from dms_train.hf.architecture import Architecture
from dms_train.hf.typed import typed

Shape = tuple[int, ...]


def _layer_shapes(a: Architecture, *, linear: bool) -> dict[str, Shape]:
    sizes = {
        "hidden": a.hidden_size,
        "ffn": a.ffn_hidden_size,
        "head": a.kv_channels,
        "query": a.num_attention_heads * a.kv_channels,
        "key": a.num_query_groups * a.kv_channels,
        "heads": a.num_attention_heads,
        "one": 1,
    }
    if a.experts is not None:
        sizes |= {"experts": a.experts.count, "expert_ffn": a.experts.ffn_hidden_size}
        sizes |= {"shared_ffn": a.experts.shared_ffn_hidden_size}
    if a.linear is not None:
        sizes |= {"linear_key": a.linear.keys, "linear_value": a.linear.values}
        sizes |= {"linear_heads": a.linear.value_heads, "linear_head": a.linear.value_channels}
        sizes |= {"taps": a.linear.taps}
    named = layer_tensors(a.described, a.num_experts, linear=linear)
    return {name: tuple(sizes[of] for of in dimensions) for name, dimensions in named.items()}


@typed
def expected_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Return name and shape of every tensor of a model directory, in file order.

    Tied models have no `lm_head.weight`. Retrofit methods add no tensors.
    """
    a = architecture
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for layer, attention in enumerate(a.attention_layers):
        own = _layer_shapes(a, linear=attention.linear)
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in own.items()})
    shapes["model.norm.weight"] = (a.hidden_size,)
    if not a.tie_word_embeddings:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    return shapes
