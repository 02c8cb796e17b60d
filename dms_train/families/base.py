"""Description of a model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

# Activation of a gated MLP, with the name that transformers uses in config.json.
Activation = Literal["silu", "gelu_pytorch_tanh"]
GATE_ALPHA, GATE_LIMIT = 1.702, 7.0
"""Constants of a clamped gate, (up + 1) gate sigmoid(alpha gate), with the gate at most the limit
and up within the limit of 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """Attention of one layer.

    Attributes:
        rotary_base: Base of RoPE; None for a layer without RoPE.
        window: Tokens that a query reads, its own included; None for all.
        linear: Whether the layer has linear attention (a gated delta net), which has a state of
            fixed size in place of keys and values.

    Retrofit methods act on layers that are neither linear nor have a window.
    """

    rotary_base: float | None
    window: int | None = None
    linear: bool = False


class LayerKeys(NamedTuple):
    """Keys of config.json that describe the attention layer by layer.

    Attributes:
        read: Function of a config.json mapping and the base of RoPE that returns every layer.
            `ModelFamily.refuse` has checked the mapping.
        write: Function of all layers that returns the keys.
        has_windows: Whether layers may have a window.
        has_linear: Whether layers may have linear attention.
        has_local_base: Whether the layers with a window have a RoPE of their own: a base, which
            may be that of the other layers, and no scaling. `rope_parameters` then states RoPE for
            each type of layer.
    """

    read: Callable[[Mapping[str, Any], float], tuple[LayerAttention, ...]]
    write: Callable[[tuple[LayerAttention, ...]], dict[str, Any]]
    has_windows: bool = False
    has_local_base: bool = False
    has_linear: bool = False


class ExpertKeys(NamedTuple):
    """Keys of config.json that describe a mixture of experts in every layer.

    Attributes:
        number: Key of the number of experts. `num_local_experts` is read too.
        width: Key of the width of an expert.
        normalize: Key that says whether the weights of a token's experts are divided by their sum;
            None if they always are.
        topk: `num_experts_per_tok` if config.json lacks the key.
        experts: Number of experts if config.json lacks the key.
        expert_width: Width of an expert if config.json lacks the key.
        normalizes: Value of `normalize` if config.json lacks the key.
        shared: Key of the width of a further expert, through which every token passes and whose
            output a gate multiplies; None in a family without.
    """

    number: str = "num_experts"
    width: str = "moe_intermediate_size"
    normalize: str | None = "norm_topk_prob"
    topk: int = 8
    experts: int = 128
    expert_width: int = 768
    normalizes: bool = False
    shared: str | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFamily:
    """A decoder of blocks with RoPE, RMSNorm, grouped-query attention and a gated MLP.

    Attributes:
        name: `model_type` of Hugging Face, and the name of the module.
        classes: Prefix of the classes in transformers (`Llama`: LlamaAttention, LlamaForCausalLM).
        package: Package in `transformers.models`; None if it is `name`.
        config_classes: Prefix of the configuration class; None if it is `classes`.
        qkv_bias: Whether the q, k and v projections have a bias.
        qk_norm: Whether q and k are normalised before RoPE.
        joint_qk_norm: Whether this norm is over all heads together, not per head.
        linear_bias: Whether the output projection of attention, the router and the experts have a
            bias; only in families with experts.
        sinks: Whether every query head has a learned logit in the denominator of its softmax.
        output_gate: Whether sigmoid(gate) multiplies the output of attention before the output
            projection; the gate is a projection of the layer's input as large as the queries.
        expert_keys: Keys of the mixture of experts that every layer has in place of its MLP; None
            in a family of MLPs.
        stacked_experts: Whether the files hold the experts of a layer in one tensor, [experts,
            inputs, outputs], in which columns of gate and up projection alternate. The experts may
            be quantised to MXFP4.
        clamped_gate: Whether the gate of an expert is clamped, as `GATE_ALPHA` describes.
        activation: Activation of the MLP.
        activation_key: Key of the activation in config.json.
        sandwich_norms: Whether attention and MLP normalise their updates of the residual stream
            too.
        input_norms: Whether attention and MLP normalise their input; only with `sandwich_norms`
            may they not.
        centered_norms: Whether norms multiply by 1 + weight.
        scaled_embeddings: Whether embeddings are multiplied by the square root of the hidden size,
            rounded to their dtype.
        has_query_scalar: Whether config.json states the softmax scale, as `query_pre_attn_scalar`
            to the power of -1/2.
        tied_by_default: Value of `tie_word_embeddings` if config.json lacks the key.
        kv_heads_required: Whether config.json must have `num_key_value_heads`. Without it a config
            has as many KV heads as query heads.
        head_size: Head size if config.json lacks `head_dim`; None means hidden size / query heads.
        always_has_head_dim: Whether `head_dim` is written even if it equals hidden size / heads.
        rotary_base: Base of RoPE if config.json states none.
        norm_epsilon: `rms_norm_eps` if config.json states none.
        rope_types: Supported rules of RoPE scaling besides `default`.
        rotary_factor: Share of the channels of a head that RoPE rotates if config.json lacks
            `partial_rotary_factor`; None if RoPE always rotates all of them.
        interleaved_rope: Whether RoPE turns channel 2 i with 2 i + 1. Otherwise it turns channel i
            with the one that lies half the rotated channels after it.
        stored: Modules of a layer whose weights have other names in the files, by the name in the
            files. Several modules are joined by rows, in this order.
        stored_by_head: Those of `stored` that join their modules for each query head, or for each
            key head of linear attention.
        multimodal: `model_type` of checkpoints with a vision tower, whose language model is of this
            family. Its keys are in `text_config`, and its tensors have the prefix
            `model.language_model`. None if there are none.
        left_out: Prefixes of tensors in the files that the language model does not need.
        layers: Keys of a family whose layers may differ; None for any other.
        fixed: Keys of config.json that are written, and refused with other values.
        written: Further keys to write; `refuse` checks them on reading.
        refuse: Function that returns the first key with an unsupported value.
    """

    name: str
    classes: str
    package: str | None = None
    config_classes: str | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    linear_bias: bool = False
    sinks: bool = False
    output_gate: bool = False
    expert_keys: ExpertKeys | None = None
    stacked_experts: bool = False
    clamped_gate: bool = False
    activation: Activation = "silu"
    activation_key: str = "hidden_act"
    sandwich_norms: bool = False
    input_norms: bool = True
    centered_norms: bool = False
    scaled_embeddings: bool = False
    has_query_scalar: bool = False
    tied_by_default: bool = False
    kv_heads_required: bool = True
    head_size: int | None = None
    always_has_head_dim: bool = True
    rotary_base: float = 10000.0
    norm_epsilon: float = 1e-6
    rope_types: tuple[str, ...] = ()
    rotary_factor: float | None = None
    interleaved_rope: bool = False
    stored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stored_by_head: tuple[str, ...] = ()
    multimodal: str | None = None
    left_out: tuple[str, ...] = ()
    layers: LayerKeys | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    refuse: Callable[[Mapping[str, Any]], Refusal | None] | None = None

    @property
    def has_experts(self) -> bool:
        """True if every layer has a mixture of experts in place of its MLP."""
        return self.expert_keys is not None

    @property
    def shares_expert(self) -> bool:
        """True if every token passes through one expert of each layer besides its own."""
        return self.expert_keys is not None and self.expert_keys.shared is not None

    @property
    def causal_lm(self) -> str:
        """Name of the model class of transformers."""
        return f"{self.classes}ForCausalLM"

    @property
    def config_class(self) -> str:
        """Name of the configuration class of transformers."""
        return f"{self.config_classes or self.classes}Config"

    @property
    def modeling(self) -> str:
        """Name of the module of transformers that defines the classes."""
        package = self.package or self.name
        return f"transformers.models.{package}.modeling_{package}"
