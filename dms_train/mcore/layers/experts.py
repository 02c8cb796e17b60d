"""Mixture of experts of megatron-core, with the components of this package."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dms_train.hf.architecture import Architecture
from dms_train.mcore.layers.backend import FusedGate
from dms_train.mcore.options import ParallelOptions


class _ExpertOutput(RowParallelLinear):
    """Output projection of an expert, whose bias the ranks that share the expert add up."""

    def forward(self, input_: Tensor) -> Any:
        """Return this rank's part of the output [tokens, h], and of the bias."""
        if self.bias is None:
            return super().forward(input_)
        # Megatron's function returns a view, to which its MLP could not add the bias in place
        return F.linear(input_, self.weight), self.bias / self.tp_group.size()


class _Experts(SequentialMLP):
    """Experts of this rank, one after the other; megatron-core's own linear layers."""

    def __init__(
        self, count: int, config: TransformerConfig, pg_collection: Any = None, **_: Any
    ) -> None:
        submodules = MLPSubmodules(
            linear_fc1=ColumnParallelLinear,
            linear_fc2=_ExpertOutput,
            activation_func=FusedGate,
        )
        super().__init__(count, config, submodules, pg_collection)
        for parameter in self.parameters():
            # megatron gives experts an optimizer of their own only where ranks share them; a
            # checkpoint of one layout would not fit another
            setattr(parameter, "allreduce", False)  # noqa: B010


class _Router(TopKRouter):
    """Router whose logits are computed in float32.

    The function of megatron-core 0.16 for this needs Transformer Engine.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Return logits [s, b, experts] for the hidden states [s, b, h]."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)


class MixtureOfExperts(MoELayer):
    """Router and experts of one layer."""

    def __init__(self, config: TransformerConfig, pg_collection: Any = None, **_: Any) -> None:
        shared = MLPSubmodules(
            linear_fc1=ColumnParallelLinear,
            linear_fc2=RowParallelLinear,
            activation_func=FusedGate,
        )
        submodules = MoESubmodules(
            experts=_Experts,
            router=_Router,
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=shared),
        )
        super().__init__(config, submodules, pg_collection=pg_collection)
        if self.shared_experts is not None:  # megatron makes its gate on the host
            gate = self.shared_experts.gate_weight
            gate.data = gate.data.to(torch.cuda.current_device())


def expert_options(architecture: Architecture, options: ParallelOptions) -> dict[str, Any]:
    """Return the part of megatron-core's configuration that describes the experts."""
    experts = architecture.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": experts.topk,
        # a softmax over the chosen experts is one over all experts, divided by the chosen ones' sum
        "moe_router_pre_softmax": not experts.normalize,
        "moe_router_dtype": "fp32",
        # the router stays close to the original's; a balancing loss would move it
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # its collectives run on gloo too, and a token of these models goes to most ranks anyway
        "moe_token_dispatcher_type": "allgather",
        "expert_model_parallel_size": options.expert_model_parallel_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": experts.shared_ffn_hidden_size > 0,
    }
