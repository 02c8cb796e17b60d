"""Gated delta net in place of self-attention, in layers on which no retrofit method acts.

Megatron-core's own layer needs the package `fla`, and has neither packed documents nor context
parallelism. Ranks share key heads as they share KV heads in attention (`mcore.layers.context`).
Shape letters: s positions, b samples, g key heads of this rank, w projected channels of one.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dms_train.hf.linear_attention import LinearAttention
from dms_train.kernels.layers.delta_rule import MixerWeights, mix_tokens
from dms_train.mcore.layers.attention import MethodState
from dms_train.mcore.layers.context import to_heads, to_positions
from dms_train.method.documents import PackedDocuments
from dms_train.method.eviction_stats import EVICTION_STATS

_SHARDED = ("conv1d", "dt_bias", "A_log")


class GatedDeltaNet(MegatronModule):
    """Layer with the interface of `MethodSelfAttention`; its statistics are zero.

    It keeps the output of its projection for the backward pass, and computes the rest again.

    Args:
        config: Megatron's configuration.
        layer_number: Number of the layer, from 1.
        method: State that the layers share.
        sizes: Heads of the whole model.
        projections: Classes of the linear layers out of and into the residual stream.
        pg_collection: Process groups.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        method: MethodState,
        sizes: LinearAttention,
        projections: tuple[type, type],
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.method = layer_number, method
        self.tp, self.cp = pg_collection.tp, pg_collection.cp
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp}
        self.in_proj = projections[0](
            config.hidden_size,
            sizes.key_heads * sum(sizes.group_rows),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **common,
        )
        self.out_proj = projections[1](
            sizes.values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **common,
        )
        self._groups = sizes.key_heads // (self.tp.size() * self.cp.size())
        self._add_weights(sizes)
        self.documents: PackedDocuments | None = None
        self.eviction_stats: Tensor | None = None
        # set for every layer, and used where the method acts
        self.noise_keys: Tensor | None = None
        self.recorded: list[Tensor] | None = None
        self.held: Tensor | None = None

    def _add_weights(self, sizes: LinearAttention) -> None:
        """Allocate the weights between the projections; those of heads are divided by rank."""
        shapes: dict[str, tuple[int, ...]] = {
            "conv1d": (2 * sizes.keys + sizes.values, sizes.taps),
            "dt_bias": (sizes.value_heads,),
            "A_log": (sizes.value_heads,),
            "norm": (sizes.value_channels,),
        }
        device = torch.cuda.current_device()
        for name, (rows, *rest) in shapes.items():
            own = rows // self.tp.size() if name in _SHARDED else rows
            values = torch.zeros(own, *rest, device=device, dtype=self.config.params_dtype)
            parameter = torch.nn.Parameter(values)
            if name in _SHARDED:
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            self.register_parameter(name, parameter)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        """Map hidden_states, this rank's positions [s, b, h], to their updates."""
        projected, _bias = self.in_proj(hidden_states)
        if self.cp.size() > 1:
            projected = to_heads(projected, self.cp)
        batch = projected.shape[1]
        self.eviction_stats = projected.new_zeros(batch, EVICTION_STATS, dtype=torch.float32)
        first = None if self.documents is None else self.documents.first
        # the norm's gradient is summed over ranks, each of which has other heads
        norm = tensor_parallel.copy_to_tensor_model_parallel_region(self.norm, group=self.tp)
        weights = *(self._own(getattr(self, name)) for name in _SHARDED), norm
        mixed = checkpoint(
            self._mix, projected, first, *weights, use_reentrant=False, preserve_rng_state=False
        )
        return self.out_proj(to_positions(mixed, self.cp))

    def _own(self, weight: Tensor) -> Tensor:
        """Return the part of this context-parallel rank's heads."""
        return weight.chunk(self.cp.size())[self.cp.rank()]

    def _mix(self, projected: Tensor, first: Tensor | None, *weights: Tensor) -> Tensor:
        """Map [s, b, g w] to the outputs of the value heads [s, b, channels]."""
        convolution, decay_bias, log_rate, norm = weights
        epsilon = self.config.layernorm_epsilon
        own = MixerWeights(convolution, decay_bias, log_rate, norm, epsilon)
        by_head = projected.transpose(0, 1).unflatten(-1, (self._groups, -1))
        return mix_tokens(by_head, own, first=first)[0].transpose(0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the entries of a checkpoint by key."""
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        entries: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(_SHARDED, 0),
            sharded_offsets,
            tp_group=self.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            entries |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp
            )
        return entries
