"""Description of a model family, and what Llama-like decoders share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Layout = Literal["plain", "qkv", "gated", "linear", "taps"]
# Activation of a gated MLP, with the name that transformers uses in config.json.
Activation = Literal["silu", "gelu_pytorch_tanh"]
# A dimension of a tensor: `hidden`, `ffn`, `head` (one head), `query` (all query heads), `key` (all
# KV heads), `heads` (number of query heads), `experts` (number of them), `expert_ffn`, `shared_ffn`
# (width of a shared expert), `one`. In layers with linear attention: `linear_key` and
# `linear_value` (all heads), `linear_heads` (number of value heads), `linear_head` (one value
# head), `taps` of the convolution.
Dimension = Literal[
    "hidden",
    "ffn",
    "head",
    "query",
    "key",
    "heads",
    "experts",
    "expert_ffn",
    "shared_ffn",
    "linear_key",
    "linear_value",
    "linear_heads",
    "linear_head",
    "taps",
    "one",
]


@dataclass(frozen=True, slots=True)
class ParameterMap:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    Attributes:
        megatron: Name in megatron-core; inside a layer, without the layer's prefix.
        hf: Names of the Hugging Face tensors, in the order of joining.
        layout: `plain` is the same tensor; `qkv` interleaves q, gate (if any), k and v rows per KV
            group; `gated` stacks gate over up; `linear` interleaves rows per key head of linear
            attention; `taps` does so for those of a convolution, [rows, 1, taps] in the files.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = "plain"


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


GATE_ALPHA, GATE_LIMIT = 1.702, 7.0
"""Constants of a clamped gate, (up + 1) gate sigmoid(alpha gate), with the gate at most the limit
and up within the limit of 0."""
LOCAL_EXPERTS = "mlp.experts.local_experts"
"""Name of the experts in a layer of Megatron."""
_QKV = tuple(f"self_attn.{c}_proj" for c in "qkv")
_GATED_QKV = ("self_attn.q_proj", "self_attn.gate_proj", *_QKV[1:])
_OUTPUT = ParameterMap("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",))
# Projections of linear attention: queries, keys, values, output gate, update rate, decay.
_LINEAR_IN = tuple(f"linear_attn.in_proj_{part}.weight" for part in "qkvzba")
_LINEAR = (
    ParameterMap("self_attention.in_proj.weight", _LINEAR_IN, "linear"),
    ParameterMap(
        "self_attention.conv1d",
        tuple(f"linear_attn.conv1d_{part}.weight" for part in "qkv"),
        "taps",
    ),
    ParameterMap("self_attention.dt_bias", ("linear_attn.dt_bias",)),
    ParameterMap("self_attention.A_log", ("linear_attn.A_log",)),
    ParameterMap("self_attention.norm", ("linear_attn.norm.weight",)),
    ParameterMap("self_attention.out_proj.weight", ("linear_attn.out_proj.weight",)),
)
_INPUT_NORM = ParameterMap("input_layernorm.weight", ("input_layernorm.weight",))
_PRE_NORMS = (
    _INPUT_NORM,
    ParameterMap("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
)
_POST_NORMS = (
    ParameterMap("post_attention_layernorm.weight", ("post_attention_layernorm.weight",)),
    ParameterMap("post_mlp_layernorm.weight", ("post_feedforward_layernorm.weight",)),
)
_SANDWICH_NORMS = (
    _INPUT_NORM,
    _POST_NORMS[0],
    ParameterMap("pre_mlp_layernorm.weight", ("pre_feedforward_layernorm.weight",)),
    _POST_NORMS[1],
)
_ROUTER = (ParameterMap("mlp.router.weight", ("mlp.gate.weight",)),)
_SHARED_GATE = "mlp.shared_expert_gate.weight"
_LINEAR_BIAS = (
    ParameterMap("mlp.router.bias", ("mlp.gate.bias",)),
    ParameterMap("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",)),
)
# megatron-core's own attention has the parameter under this name
_SINKS = (ParameterMap("self_attention.core_attention.softmax_offset", ("self_attn.sinks",)),)
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
}
_LINEAR_TENSORS: dict[str, tuple[Dimension, ...]] = {
    "linear_attn.in_proj_q.weight": ("linear_key", "hidden"),
    "linear_attn.in_proj_k.weight": ("linear_key", "hidden"),
    "linear_attn.in_proj_v.weight": ("linear_value", "hidden"),
    "linear_attn.in_proj_z.weight": ("linear_value", "hidden"),
    "linear_attn.in_proj_b.weight": ("linear_heads", "hidden"),
    "linear_attn.in_proj_a.weight": ("linear_heads", "hidden"),
    "linear_attn.conv1d_q.weight": ("linear_key", "one", "taps"),
    "linear_attn.conv1d_k.weight": ("linear_key", "one", "taps"),
    "linear_attn.conv1d_v.weight": ("linear_value", "one", "taps"),
    "linear_attn.dt_bias": ("linear_heads",),
    "linear_attn.A_log": ("linear_heads",),
    "linear_attn.norm.weight": ("linear_head",),
    "linear_attn.out_proj.weight": ("hidden", "linear_value"),
}
_ROUTER_TENSORS: dict[str, tuple[Dimension, ...]] = {"mlp.gate.weight": ("experts", "hidden")}
_QKV_BIAS_TENSORS: dict[str, tuple[Dimension, ...]] = {
    "self_attn.q_proj.bias": ("query",),
    "self_attn.k_proj.bias": ("key",),
    "self_attn.v_proj.bias": ("key",),
}
_QK_NORM_TENSORS: dict[str, tuple[Dimension, ...]] = {
    "self_attn.q_norm.weight": ("head",),
    "self_attn.k_norm.weight": ("head",),
}
_JOINT_QK_NORM_TENSORS: dict[str, tuple[Dimension, ...]] = {
    "self_attn.q_norm.weight": ("query",),
    "self_attn.k_norm.weight": ("key",),
}


def _mlp(megatron: str, hf: str, *, bias: bool = False) -> tuple[ParameterMap, ...]:
    """Map a gated MLP whose names have these prefixes."""
    maps: tuple[ParameterMap, ...] = ()
    for kind in ("weight", "bias") if bias else ("weight",):
        gate_and_up = (f"{hf}.gate_proj.{kind}", f"{hf}.up_proj.{kind}")
        maps += (
            ParameterMap(f"{megatron}.linear_fc1.{kind}", gate_and_up, "gated"),
            ParameterMap(f"{megatron}.linear_fc2.{kind}", (f"{hf}.down_proj.{kind}",)),
        )
    return maps


def _mlp_tensors(
    hf: str, width: Dimension, *, bias: bool = False
) -> dict[str, tuple[Dimension, ...]]:
    """Return the tensors of a gated MLP of this width."""
    tensors: dict[str, tuple[Dimension, ...]] = {
        f"{hf}.gate_proj.weight": (width, "hidden"),
        f"{hf}.up_proj.weight": (width, "hidden"),
        f"{hf}.down_proj.weight": ("hidden", width),
    }
    if bias:
        rows = {name.replace("weight", "bias"): sizes[:1] for name, sizes in tensors.items()}
        tensors |= rows
    return tensors


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

    def layer_parameters(
        self, experts: int = 0, *, linear: bool = False
    ) -> tuple[ParameterMap, ...]:
        """Return the parameters of one decoder layer in Megatron.

        Args:
            experts: Number of experts; 0 for an MLP.
            linear: Whether the layer has linear attention.
        """
        mlp = _mlp("mlp", "mlp") if not experts else _ROUTER
        for number in range(experts):
            names = f"{LOCAL_EXPERTS}.{number}", f"mlp.experts.{number}"
            mlp += _mlp(*names, bias=self.linear_bias)
        if self.shares_expert:
            mlp += _mlp("mlp.shared_experts", "mlp.shared_expert")
            mlp += (ParameterMap("mlp.shared_experts.gate_weight", (_SHARED_GATE,)),)
        if linear:
            return _LINEAR + self._norms + mlp
        rows = tuple(f"{n}.weight" for n in (_GATED_QKV if self.output_gate else _QKV))
        qkv = ParameterMap("self_attention.linear_qkv.weight", rows, "qkv")
        parameters = (qkv, _OUTPUT, *self._norms, *mlp)
        parameters += _QKV_BIAS if self.qkv_bias else ()
        parameters += _LINEAR_BIAS if self.linear_bias else ()
        parameters += _SINKS if self.sinks else ()
        return parameters + (_QK_NORM if self.qk_norm else ())

    @property
    def _norms(self) -> tuple[ParameterMap, ...]:
        """Norms of the residual stream and of its updates."""
        if not self.input_norms:
            return _POST_NORMS
        return _SANDWICH_NORMS if self.sandwich_norms else _PRE_NORMS

    def layer_tensors(
        self, experts: int = 0, *, linear: bool = False
    ) -> dict[str, tuple[Dimension, ...]]:
        """Return the tensors of one decoder layer by name, in file order.

        Names are those of Llama and Gemma 3; those of the files are in `stored`.

        Args:
            experts: Number of experts; 0 for an MLP.
            linear: Whether the layer has linear attention.
        """
        mlp = _mlp_tensors("mlp", "ffn") if not experts else dict(_ROUTER_TENSORS)
        for number in range(experts):
            mlp |= _mlp_tensors(f"mlp.experts.{number}", "expert_ffn", bias=self.linear_bias)
        if self.shares_expert:
            mlp |= _mlp_tensors("mlp.shared_expert", "shared_ffn")
            mlp |= {_SHARED_GATE: ("one", "hidden")}
        norms: dict[str, tuple[Dimension, ...]] = {
            name: ("hidden",) for entry in self._norms for name in entry.hf
        }
        if linear:
            return {**_LINEAR_TENSORS, **mlp, **norms}
        bias = dict(_QKV_BIAS_TENSORS) if self.qkv_bias else {}
        if self.linear_bias:
            bias |= {"self_attn.o_proj.bias": ("hidden",), "mlp.gate.bias": ("experts",)}
        if self.sinks:
            bias |= {"self_attn.sinks": ("heads",)}
        head_norms = _JOINT_QK_NORM_TENSORS if self.joint_qk_norm else _QK_NORM_TENSORS
        head_norms = head_norms if self.qk_norm else {}
        gate: dict[str, tuple[Dimension, ...]] = {}
        if self.output_gate:
            gate = {"self_attn.gate_proj.weight": ("query", "hidden")}
        return {**_LAYER_TENSORS, **gate, **mlp, **norms, **bias, **head_norms}


FUSED_QKV = {"self_attn.qkv_proj": _QKV}
"""One matrix for queries, keys and values, for `ModelFamily.stored`."""
FUSED_MLP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
"""One matrix for gate and up projection, for `ModelFamily.stored`."""
LINEAR_PARTS = {
    "linear_attn.in_proj_qkv": tuple(f"linear_attn.in_proj_{part}" for part in "qkv"),
    "linear_attn.conv1d": tuple(f"linear_attn.conv1d_{part}" for part in "qkv"),
}
"""Queries, keys and values of linear attention in one matrix, for `ModelFamily.stored`."""
LINEAR_PARTS_BY_HEAD = {
    "linear_attn.in_proj_qkvz": tuple(f"linear_attn.in_proj_{part}" for part in "qkvz"),
    "linear_attn.in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
}
"""Projections of linear attention joined for each key head, for `ModelFamily.stored`."""
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
"""Types of layers in `layer_types` of config.json."""
_WINDOW, _FULL_LAYERS = 4096, 28  # defaults of transformers in Qwen2 and Qwen3


def _layer_kinds(config: Mapping[str, Any]) -> Any:
    """Return `layer_types`, or what transformers derives from `max_window_layers`."""
    stated = config.get("layer_types")
    if stated is not None:
        return stated
    slides, full = config.get("use_sliding_window"), config.get("max_window_layers", _FULL_LAYERS)
    layers = range(config["num_hidden_layers"])
    return [SLIDING if slides and layer >= full else FULL for layer in layers]


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the window of `sliding_attention`; None if it holds the longest sequence."""
    window: int = config.get("sliding_window", _WINDOW)
    return window if window < config["max_position_embeddings"] else None


def refuse_kinds(kinds: Any, known: tuple[str, ...], layers: int) -> Refusal | None:
    """Refuse `layer_types` that are not one of the known types for each of `layers` layers."""
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        return Refusal("layer_types", kinds, f"state {' or '.join(known)} for every layer")
    if len(kinds) != layers:
        return Refusal("layer_types", kinds, f"state one type for each of {layers} layers")
    return None


def refuse_short_window(config: Mapping[str, Any], default: int | None = None) -> Refusal | None:
    """Refuse a window of all layers that is shorter than the longest sequence.

    Args:
        config: config.json.
        default: Window if config.json lacks `sliding_window`; None for full attention.
    """
    window = config.get("sliding_window", default)
    longest = config["max_position_embeddings"]
    if window is None or (type(window) is int and window >= longest):
        return None
    fix = "use a model with full attention (sliding_window=null)"
    return Refusal(
        "sliding_window", window, f"it is below max_position_embeddings={longest}; {fix}"
    )


def local_only(kinds: list[str]) -> Refusal:
    """Refuse a model in which every layer has a window."""
    return Refusal("layer_types", kinds, "use a model with layers that read all tokens")


def refuse_sliding(config: Mapping[str, Any], kinds: Any, window: Any) -> Refusal | None:
    """Refuse types of layers and a window that no model has, and models without a global layer."""
    refusal = refuse_kinds(kinds, (SLIDING, FULL), config["num_hidden_layers"])
    if refusal is not None:
        return refusal
    if FULL not in kinds:
        return local_only(kinds)
    if SLIDING in kinds and (type(window) is not int or window < 1):
        return Refusal("sliding_window", window, "state a whole number above 0")
    return None


def write_sliding(layers: tuple[LayerAttention, ...], *, default: int) -> dict[str, Any]:
    """Return the keys of layers with and without a window; `default` stands where none has one."""
    windows = [layer.window for layer in layers]
    return {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": max(filter(None, windows), default=default),
    }


def local_base(config: Mapping[str, Any], default: Any) -> Any:
    """Return the RoPE base of the layers with a window, which transformers 5 writes for them."""
    stated = (config.get("rope_parameters") or {}).get(SLIDING) or {}
    return stated.get("rope_theta", default)


def refuse_local_rope(config: Mapping[str, Any], key: str, default: Any) -> Refusal | None:
    """Refuse RoPE of the layers with a window that is not plain RoPE with a base.

    Args:
        config: A config.json mapping.
        key: Key whose value is the base if `rope_parameters` states none.
        default: Its value.
    """
    block: Any = config
    for name in ("rope_parameters", SLIDING):
        block = block.get(name) or {}
        if not isinstance(block, Mapping):
            return Refusal(name, block, "state a JSON object or null")
    base = local_base(config, default)
    if type(base) not in (int, float) or not 0 < base < math.inf:
        return Refusal(key, base, "state a number above 0")
    for name, only in (("rope_type", "default"), ("partial_rotary_factor", 1.0)):
        if block.get(name, only) != only:
            return Refusal(name, block[name], f"use a model with {only} in {SLIDING} layers")
    return None


_PERIOD = 4  # default of `full_attention_interval`


def _linear_kinds(config: Mapping[str, Any]) -> Any:
    """Return `layer_types`, or what transformers derives from `full_attention_interval`."""
    stated = config.get("layer_types")
    if stated is not None:
        return stated
    period = config.get("full_attention_interval", _PERIOD)
    layers = range(1, config["num_hidden_layers"] + 1)
    return [LINEAR if layer % period else FULL for layer in layers]


def refuse_linear(config: Mapping[str, Any]) -> Refusal | None:
    """Refuse layers that `LINEAR_LAYERS` cannot read, and models without full attention."""
    period = config.get("full_attention_interval", _PERIOD)
    if type(period) is not int or period < 1:
        return Refusal("full_attention_interval", period, "state a whole number above 0")
    kinds = _linear_kinds(config)
    refusal = refuse_kinds(kinds, (LINEAR, FULL), config["num_hidden_layers"])
    if refusal is None and FULL not in kinds:
        return Refusal("layer_types", kinds, "use a model with layers of full attention")
    return refusal


def _read_linear(config: Mapping[str, Any], base: float) -> tuple[LayerAttention, ...]:
    linear, full = LayerAttention(rotary_base=None, linear=True), LayerAttention(rotary_base=base)
    return tuple(linear if kind == LINEAR else full for kind in _linear_kinds(config))


def _write_linear(layers: tuple[LayerAttention, ...]) -> dict[str, Any]:
    return {"layer_types": [LINEAR if layer.linear else FULL for layer in layers]}


LINEAR_LAYERS = LayerKeys(_read_linear, _write_linear, has_linear=True)
"""Keys of Qwen3-Next and Qwen3.5: `layer_types`, `full_attention_interval`."""


def refuse_windows(config: Mapping[str, Any]) -> Refusal | None:
    """Refuse windows that `WINDOWED_LAYERS` cannot read, and models without a global layer."""
    slides, layers = config.get("use_sliding_window"), config["num_hidden_layers"]
    if slides is not None and type(slides) is not bool:
        return Refusal("use_sliding_window", slides, "state true or false")
    read = {"sliding_window": _WINDOW}
    if config.get("layer_types") is None:
        read["max_window_layers"] = _FULL_LAYERS
    for key, default in read.items():
        value = config.get(key, default)
        if slides and (type(value) is not int or value < 1):
            return Refusal(key, value, "state a whole number above 0")
    kinds = _layer_kinds(config)
    known = (SLIDING, FULL) if slides else (FULL,)
    refusal = refuse_kinds(kinds, known, layers)
    if refusal is None and FULL not in kinds and _window(config) is not None:
        return local_only(kinds)
    return refusal


def _read_windows(config: Mapping[str, Any], base: float) -> tuple[LayerAttention, ...]:
    return tuple(
        LayerAttention(rotary_base=base, window=_window(config) if kind == SLIDING else None)
        for kind in _layer_kinds(config)
    )


def _write_windows(layers: tuple[LayerAttention, ...]) -> dict[str, Any]:
    windows = [layer.window for layer in layers]
    if not any(windows):
        return {}
    return {
        "use_sliding_window": True,
        "sliding_window": max(filter(None, windows)),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


WINDOWED_LAYERS = LayerKeys(_read_windows, _write_windows, has_windows=True)
"""Keys of Qwen2 and Qwen3: `use_sliding_window`, `sliding_window`, `layer_types`."""
