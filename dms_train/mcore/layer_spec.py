"""The ModuleSpec of a Llama-like block with our attention in megatron's layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
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
)
from torch import Tensor

from dms_train.mcore.attention import CoreAttention, DMSSelfAttention, MethodState


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose gradient megatron sums over tensor ranks under sequence parallelism."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        device = torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


def _swiglu() -> Callable[[Tensor], Tensor]:
    """The activation as one kernel; megatron's slot for it takes functions too."""
    from dms_train.kernels.triton_swiglu import swiglu

    return swiglu


def layer_spec(method: MethodState, *, qk_layernorm: bool) -> ModuleSpec:
    """One decoder layer."""
    norm = RMSNorm if qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=DMSSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "method": method},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=partial(CoreAttention, method=method),
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )
    mlp = MLPSubmodules(
        linear_fc1=ColumnParallelLinear,
        activation_func=_swiglu() if method.fused else None,
        linear_fc2=RowParallelLinear,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(module=MLP, submodules=mlp),
            mlp_bda=get_bias_dropout_add,
            # the fused layers' names, so that a checkpoint also fits a Transformer Engine spec
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


def block_spec(
    config: TransformerConfig, method: MethodState, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline chunk and the final norm."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers = get_num_layers_to_build(config, vp_stage, stage)
    spec = layer_spec(method, qk_layernorm=config.qk_layernorm)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm)
