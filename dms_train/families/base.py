"""Description of a model family, and what Llama-like decoders share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Layout = Literal["plain", "qkv", "gated"]
# A dimension of a tensor: `hidden`, `ffn`, `head` (one head), `query` (all query heads), `key` (all
# KV heads).
Dimension = Literal["hidden", "ffn", "head", "query", "key"]


@dataclass(frozen=True, slots=True)
class ParameterMap:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    Attributes:
        megatron: Name in megatron-core; inside a layer, without the layer's prefix.
        hf: Names of the Hugging Face tensors, in the order of joining.
        layout: `plain` is the same tensor; `qkv` interleaves q, k and v rows per KV group; `gated`
            stacks gate over up.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """Attention of one layer.

    Attributes:
        rotary_base: Base of RoPE; None for a layer without RoPE.
    """

    rotary_base: float | None


class LayerKeys(NamedTuple):
    """Keys of config.json that describe the attention layer by layer.

    Attributes:
        read: Function of a config.json mapping and the base of RoPE that returns every layer.
            `ModelFamily.refuse` has checked the mapping.
        write: Function of all layers that returns the keys.
    """

    read: Callable[[Mapping[str, Any], float], tuple[LayerAttention, ...]]
    write: Callable[[tuple[LayerAttention, ...]], dict[str, Any]]


class Refusal(NamedTuple):
    """Key of config.json with an unsupported value.

    Attributes:
        key: The key.
        value: Its value.
        fix: Remedy, as an imperative.
    """

    key: str
    value: Any
    fix: str


_QKV = tuple(f"self_attn.{c}_proj" for c in "qkv")
_LAYER = (
    ParameterMap("input_layernorm.weight", ("input_layernorm.weight",)),
    ParameterMap("self_attention.linear_qkv.weight", tuple(f"{n}.weight" for n in _QKV), "qkv"),
    ParameterMap("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    ParameterMap("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
    ParameterMap("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gated"),
    ParameterMap("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
)
_QKV_BIAS = (
    ParameterMap("self_attention.linear_qkv.bias", tuple(f"{n}.bias" for n in _QKV), "qkv"),
)
_QK_NORM = tuple(
    ParameterMap(f"self_attention.{c}_layernorm.weight", (f"self_attn.{c}_norm.weight",))
    for c in "qk"
)
_LAYER_TENSORS: dict[str, tuple[Dimension, ...]] = {
    "self_attn.q_proj.weight": ("query", "hidden"),
    "self_attn.k_proj.weight": ("key", "hidden"),
    "self_attn.v_proj.weight": ("key", "hidden"),
    "self_attn.o_proj.weight": ("hidden", "query"),
    "mlp.gate_proj.weight": ("ffn", "hidden"),
    "mlp.up_proj.weight": ("ffn", "hidden"),
    "mlp.down_proj.weight": ("hidden", "ffn"),
    "input_layernorm.weight": ("hidden",),
    "post_attention_layernorm.weight": ("hidden",),
}
_QKV_BIAS_TENSORS: dict[str, tuple[Dimension, ...]] = {
    "self_attn.q_proj.bias": ("query",),
    "self_attn.k_proj.bias": ("key",),
    "self_attn.v_proj.bias": ("key",),
}
_QK_NORM_TENSORS: dict[str, tuple[Dimension, ...]] = {
    "self_attn.q_norm.weight": ("head",),
    "self_attn.k_norm.weight": ("head",),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFamily:
    """A decoder of pre-norm blocks with RoPE, grouped-query attention and SwiGLU.

    Attributes:
        name: `model_type` of Hugging Face, and the name of the module.
        classes: Prefix of the classes in transformers (`Llama`: LlamaConfig, LlamaForCausalLM).
        qkv_bias: Whether the q, k and v projections have a bias.
        qk_norm: Whether q and k are normalised per head before RoPE.
        tied_by_default: Value of `tie_word_embeddings` if config.json lacks the key.
        kv_heads_required: Whether config.json must have `num_key_value_heads`. Without it a config
            has as many KV heads as query heads.
        head_size: Head size if config.json lacks `head_dim`; None means hidden size / query heads.
        always_has_head_dim: Whether `head_dim` is written even if it equals hidden size / heads.
        rotary_base: Base of RoPE if config.json states none.
        rope_types: Supported rules of RoPE scaling besides `default`.
        layers: Keys of a family whose layers may differ; None for any other.
        fixed: Keys of config.json that are written, and refused with other values.
        written: Further keys to write; `refuse` checks them on reading.
        refuse: Function that returns the first key with an unsupported value.
    """

    name: str
    classes: str
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_by_default: bool = False
    kv_heads_required: bool = True
    head_size: int | None = None
    always_has_head_dim: bool = True
    rotary_base: float = 10000.0
    rope_types: tuple[str, ...] = ()
    layers: LayerKeys | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    refuse: Callable[[Mapping[str, Any]], Refusal | None] | None = None

    @property
    def causal_lm(self) -> str:
        """Name of the model class of transformers."""
        return f"{self.classes}ForCausalLM"

    @property
    def layer_parameters(self) -> tuple[ParameterMap, ...]:
        """Parameters of one decoder layer in Megatron, in the order of the forward pass."""
        bias = _QKV_BIAS if self.qkv_bias else ()
        return _LAYER + bias + (_QK_NORM if self.qk_norm else ())

    @property
    def layer_tensors(self) -> dict[str, tuple[Dimension, ...]]:
        """Tensors of one decoder layer in Hugging Face, by name, in file order."""
        bias = _QKV_BIAS_TENSORS if self.qkv_bias else {}
        return {**_LAYER_TENSORS, **bias, **(_QK_NORM_TENSORS if self.qk_norm else {})}
