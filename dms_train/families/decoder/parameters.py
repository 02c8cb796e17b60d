"""Parameters of a decoder layer in Megatron, and the Hugging Face tensors they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dms_train.families.base import ModelFamily

Layout = Literal["plain", "qkv", "gated", "linear", "taps"]


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
_SHARED_GATE = (ParameterMap("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",)),)
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


def layer_parameters(
    family: ModelFamily, experts: int = 0, *, linear: bool = False
) -> tuple[ParameterMap, ...]:
    """Return the parameters of one decoder layer in Megatron.

    Args:
        family: Family of the model.
        experts: Number of experts; 0 for an MLP.
        linear: Whether the layer has linear attention.
    """
    norms_and_mlp = residual_norms(family) + _mlp_or_experts(family, experts)
    if linear:
        return _LINEAR + norms_and_mlp
    rows = tuple(f"{n}.weight" for n in (_GATED_QKV if family.output_gate else _QKV))
    qkv = ParameterMap("self_attention.linear_qkv.weight", rows, "qkv")
    parameters = (qkv, _OUTPUT, *norms_and_mlp)
    parameters += _QKV_BIAS if family.qkv_bias else ()
    parameters += _LINEAR_BIAS if family.linear_bias else ()
    parameters += _SINKS if family.sinks else ()
    return parameters + (_QK_NORM if family.qk_norm else ())


def residual_norms(family: ModelFamily) -> tuple[ParameterMap, ...]:
    """Return the norms of the residual stream and of its updates in one layer."""
    if not family.input_norms:
        return _POST_NORMS
    return _SANDWICH_NORMS if family.sandwich_norms else _PRE_NORMS


def _mlp_or_experts(family: ModelFamily, experts: int) -> tuple[ParameterMap, ...]:
    """Map the MLP of a layer, or the router and the experts in its place."""
    maps = _mlp("mlp", "mlp") if not experts else _ROUTER
    for number in range(experts):
        names = f"{LOCAL_EXPERTS}.{number}", f"mlp.experts.{number}"
        maps += _mlp(*names, bias=family.linear_bias)
    if family.shares_expert:
        maps += _mlp("mlp.shared_experts", "mlp.shared_expert") + _SHARED_GATE
    return maps


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
