"""Context parallelism: ranks share the positions of a sequence, and in attention its heads.

Outside attention a rank of the context-parallel group holds a range of positions. Around attention
the group exchanges positions for heads (DeepSpeed-Ulysses, arXiv:2309.14509; megatron-core's
`cp_comm_type` "a2a"). Attention, decisions, window, RoPE and packed documents therefore see whole
sequences, as with the heads of a tensor-parallel rank.

Shape letters: s positions, b samples, c context-parallel ranks, w channels of all heads.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, all_to_all_sp2hp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def sequence_shards(config: TransformerConfig) -> int:
    """Return the number of ranks that share the positions of a sample outside attention."""
    tp = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return tp * config.context_parallel_size


def to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [s/c, b, w] for [s, b, w/c]: all positions of this rank's part of the heads."""
    return all_to_all_sp2hp(x, group).view(-1, x.shape[1], x.shape[2] // group.size())


def to_positions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Invert `to_heads`; return x where one rank holds all positions."""
    if group.size() == 1:
        return x
    return all_to_all_hp2sp(x, group).view(-1, x.shape[1], x.shape[2] * group.size())


def heads_group(groups: Any) -> Any:
    """Return the group whose ranks share the heads of a layer, from Megatron's collection."""
    # without context parallelism both have the same ranks, and connections of a group take memory
    return groups.tp if groups.cp.size() == 1 else groups.tp_cp
