"""ModuleSpec of a Llama-like block with this package's attention."""

from __future__ import annotations

from functools import partial

from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from dms_train.hf.architecture import Architecture
from dms_train.mcore.layers.adapters import AdaptedOutput, AdaptedQKV
from dms_train.mcore.layers.attention import CoreAttention, MethodSelfAttention, MethodState
from dms_train.mcore.layers.backend import FusedGate, FusedRMSNorm, LayerBackend
from dms_train.mcore.layers.experts import MixtureOfExperts
from dms_train.mcore.layers.joint_norm import JointNorm
from dms_train.mcore.layers.linear_attention import GatedDeltaNet
from dms_train.mcore.layers.residual import ResidualLayer, ResidualNorm, SandwichLayer
from dms_train.mcore.options import Trainable

# Names of the fused layers, so that a checkpoint fits Transformer Engine and megatron-core layers.
_FUSED_ATTENTION = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_FUSED_LINEAR = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
_FUSED_MLP = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
PLAIN_NAMES = {
    fused: plain
    for names in (_FUSED_ATTENTION, _FUSED_LINEAR, _FUSED_MLP)
    for plain, fused in names.items()
}
"""Name of the separate norm for each norm of a fused layer."""


def _mlp(method: MethodState, layer_backend: LayerBackend, projection: type) -> ModuleSpec:
    submodules = MLPSubmodules(
        linear_fc1=layer_backend.in_mlp(projection),
        activation_func=FusedGate if method.fused else None,
        linear_fc2=layer_backend.row,
    )
    return ModuleSpec(module=MLP, submodules=submodules)


def _head_norms(a: Architecture, norm: type) -> dict[str, type | ModuleSpec]:
    """Return the norms of queries and keys."""
    if not a.qk_layernorm:
        return {"q_layernorm": IdentityOp, "k_layernorm": IdentityOp}
    if not a.described.joint_qk_norm:
        return {"q_layernorm": norm, "k_layernorm": norm}
    heads = {"q_layernorm": a.num_attention_heads, "k_layernorm": a.num_query_groups}
    return {
        name: ModuleSpec(module=JointNorm, params={"heads": count, "fused": norm is FusedRMSNorm})
        for name, count in heads.items()
    }


def _attention_spec(
    architecture: Architecture,
    method: MethodState,
    layer_backend: LayerBackend,
    train: Trainable,
    *,
    decides: bool,
) -> ModuleSpec:
    """Describe the attention of a layer, with adapters where `train` asks for them."""
    linear_qkv, linear_proj = _projection(architecture, layer_backend), layer_backend.row
    if (train.adapts and decides) or {"q", "k", "v"} & set(train.targets):
        values = {"trainable": train, "layer": method.layer if decides else None}
        linear_qkv = ModuleSpec(module=AdaptedQKV, params=values)
    if "o" in train.targets:
        linear_proj = ModuleSpec(module=AdaptedOutput, params={"trainable": train})
    return ModuleSpec(
        module=MethodSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "method": method},
        submodules=SelfAttentionSubmodules(
            linear_qkv=linear_qkv,
            core_attention=partial(
                CoreAttention, method=method, sinks=architecture.described.sinks
            ),
            linear_proj=linear_proj,
            **_head_norms(architecture, layer_backend.norm),
        ),
    )


def _linear_spec(
    architecture: Architecture, method: MethodState, layer_backend: LayerBackend
) -> ModuleSpec:
    """Describe the mixer of a layer with linear attention."""
    values = {
        "method": method,
        "sizes": architecture.linear,
        "projections": (_projection(architecture, layer_backend), layer_backend.row),
    }
    return ModuleSpec(module=GatedDeltaNet, params=values)


def _projection(a: Architecture, layer_backend: LayerBackend) -> type:
    """Return the projection out of the residual stream."""
    return layer_backend.norm_linear if a.described.input_norms else layer_backend.linear


def layer_spec(
    architecture: Architecture,
    method: MethodState,
    layer_backend: LayerBackend,
    train: Trainable,
    *,
    decides: bool,
    linear: bool,
) -> ModuleSpec:
    """Describe one decoder layer.

    Args:
        architecture: The model.
        method: State that the layers share.
        layer_backend: Linear layers and norms.
        train: Weights that train.
        decides: Whether the method acts on the layer.
        linear: Whether the layer has linear attention.
    """
    family, has_experts = architecture.described, architecture.experts is not None
    outer, fuses = layer_backend.norm, layer_backend.fuses_norm
    layer: type = TransformerLayer
    if family.sandwich_norms:
        layer = SandwichLayer
    elif outer is FusedRMSNorm and not fuses:
        layer, outer = ResidualLayer, ResidualNorm
    if fuses or not family.input_norms:
        outer = IdentityOp
    fused_names = _FUSED_LINEAR if linear else _FUSED_ATTENTION
    fused_names = fused_names if has_experts else {**fused_names, **_FUSED_MLP}
    if linear:
        mixer = _linear_spec(architecture, method, layer_backend)
    else:
        mixer = _attention_spec(architecture, method, layer_backend, train, decides=decides)
    return ModuleSpec(
        module=layer,
        params={"norm": layer_backend.norm} if family.sandwich_norms else {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=outer,
            self_attention=mixer,
            self_attn_bda=get_bias_dropout_add,
            # router and experts share one norm
            pre_mlp_layernorm=layer_backend.norm if has_experts and fuses else outer,
            mlp=MixtureOfExperts
            if has_experts
            else _mlp(method, layer_backend, _projection(architecture, layer_backend)),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={} if fuses else fused_names,
        ),
    )


def block_spec(
    config: TransformerConfig,
    method: MethodState,
    layer_backend: LayerBackend,
    train: Trainable,
    vp_stage: int | None,
    architecture: Architecture,
) -> TransformerBlockSubmodules:
    """Describe the layers of this pipeline chunk and the final norm."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    first = get_transformer_layer_offset(config, vp_stage, stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage, stage))
    common, acts_on = (architecture, method, layer_backend, train), architecture.method_layers
    linear = [layer.linear for layer in architecture.attention_layers]
    specs = [layer_spec(*common, decides=n in acts_on, linear=linear[n]) for n in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=layer_backend.norm)
