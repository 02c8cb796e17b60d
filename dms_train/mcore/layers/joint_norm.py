"""RMSNorm of queries or keys over all heads, which several ranks share.

Shape letters: s positions, b samples, n heads of this rank, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from dms_train.mcore.layers.context import heads_group


class JointNorm(torch.nn.Module):
    """Norm over the channels of all heads; a rank has the factors of its heads.

    Args:
        config: Megatron's configuration.
        hidden_size: Head size d.
        eps: Added to the mean square.
        heads: Heads of all ranks.
        fused: Whether a rank that has all heads runs the kernel of `FusedRMSNorm`.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int, fused: bool
    ) -> None:
        super().__init__()
        self.fused = fused
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "tp_cp"])
        self.tp, self.cp, self.ranks = groups.tp, groups.cp, heads_group(groups)
        self.channels, self.eps = heads * hidden_size, eps
        own = torch.ones(
            self.channels // self.tp.size(),
            device=torch.cuda.current_device(),
            dtype=config.params_dtype,
        )
        self.weight = torch.nn.Parameter(own)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [s, b, n, d]."""
        if self.fused and self.ranks.size() == 1:
            from dms_train.kernels.layers.triton_norm import rms_norm

            return rms_norm(x.flatten(2), self.weight, self.eps).view_as(x)
        # context-parallel ranks share the heads of a tensor-parallel rank
        gain = self.weight.chunk(self.cp.size())[self.cp.rank()].view(x.shape[2:])
        normed: Tensor = _Normalise.apply(x, gain, self.channels, self.eps, self.ranks)
        return normed

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the entries of a checkpoint."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )


class _Normalise(torch.autograd.Function):
    """Normalise [s, b, n, d] over the last two dimensions of all ranks, and scale by [n, d].

    It keeps its input in its own dtype, which operations of torch in float32 would keep twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, channels: int, eps: float, ranks: Any) -> Tensor:
        wide = _wide(x)
        scale = _rank_sum(wide.square(), ranks).div_(channels).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain, scale)
        ctx.channels, ctx.ranks = channels, ranks
        return (wide * scale * gain).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, scale = ctx.saved_tensors
        wide, normed = _wide(gradients[0]), _wide(x) * scale
        d_gain = (wide * normed).sum((0, 1)).to(gain.dtype)
        wide = wide * gain
        mean = _rank_sum(wide * normed, ctx.ranks).div_(ctx.channels)
        return ((wide - normed * mean) * scale).to(x.dtype), d_gain, None, None, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rank_sum(x: Tensor, ranks: Any) -> Tensor:
    """Add up the last two dimensions of all ranks, [s, b, 1, 1]."""
    total = x.sum((-2, -1), keepdim=True)
    if ranks.size() > 1:
        dist.all_reduce(total, group=ranks)
    return total
