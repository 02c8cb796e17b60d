"""Hugging Face tensors of a decoder layer, and their dimensions."""

from __future__ import annotations

from typing import Literal

from dms_train.families.base import ModelFamily
from dms_train.families.decoder.parameters import residual_norms

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
Tensors = dict[str, tuple[Dimension, ...]]
"""Dimensions of tensors by name."""

_ATTENTION: Tensors = {
    "self_attn.q_proj.weight": ("query", "hidden"),
    "self_attn.k_proj.weight": ("key", "hidden"),
    "self_attn.v_proj.weight": ("key", "hidden"),
    "self_attn.o_proj.weight": ("hidden", "query"),
}
_LINEAR: Tensors = {
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
_ROUTER: Tensors = {"mlp.gate.weight": ("experts", "hidden")}
_QKV_BIAS: Tensors = {
    "self_attn.q_proj.bias": ("query",),
    "self_attn.k_proj.bias": ("key",),
    "self_attn.v_proj.bias": ("key",),
}
_QK_NORM: Tensors = {
    "self_attn.q_norm.weight": ("head",),
    "self_attn.k_norm.weight": ("head",),
}
_JOINT_QK_NORM: Tensors = {
    "self_attn.q_norm.weight": ("query",),
    "self_attn.k_norm.weight": ("key",),
}


def layer_tensors(family: ModelFamily, experts: int = 0, *, linear: bool = False) -> Tensors:
    """Return the tensors of one decoder layer by name, in file order.

    Names are those of Llama and Gemma 3; those of the files are in `ModelFamily.stored`.

    Args:
        family: Family of the model.
        experts: Number of experts; 0 for an MLP.
        linear: Whether the layer has linear attention.
    """
    mlp = _mlp_or_experts(family, experts)
    norms: Tensors = {name: ("hidden",) for entry in residual_norms(family) for name in entry.hf}
    if linear:
        return {**_LINEAR, **mlp, **norms}
    tensors = dict(_ATTENTION)
    if family.output_gate:
        tensors |= {"self_attn.gate_proj.weight": ("query", "hidden")}
    tensors |= mlp | norms
    if family.qkv_bias:
        tensors |= _QKV_BIAS
    if family.linear_bias:
        tensors |= {"self_attn.o_proj.bias": ("hidden",), "mlp.gate.bias": ("experts",)}
    if family.sinks:
        tensors |= {"self_attn.sinks": ("heads",)}
    if family.qk_norm:
        tensors |= _JOINT_QK_NORM if family.joint_qk_norm else _QK_NORM
    return tensors


def _mlp_or_experts(family: ModelFamily, experts: int) -> Tensors:
    """Return the tensors of the MLP of a layer, or of the router and the experts in its place."""
    tensors = dict(_ROUTER) if experts else _mlp("mlp", "ffn")
    for number in range(experts):
        tensors |= _mlp(f"mlp.experts.{number}", "expert_ffn", bias=family.linear_bias)
    if family.shares_expert:
        tensors |= _mlp("mlp.shared_expert", "shared_ffn")
        tensors |= {"mlp.shared_expert_gate.weight": ("one", "hidden")}
    return tensors


def _mlp(hf: str, width: Dimension, *, bias: bool = False) -> Tensors:
    """Return the tensors of a gated MLP of this width."""
    tensors: Tensors = {
        f"{hf}.gate_proj.weight": (width, "hidden"),
        f"{hf}.up_proj.weight": (width, "hidden"),
        f"{hf}.down_proj.weight": ("hidden", width),
    }
    if bias:
        tensors |= {name.replace("weight", "bias"): size[:1] for name, size in tensors.items()}
    return tensors
