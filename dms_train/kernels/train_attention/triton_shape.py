"""Sizes and saved tensors of one call of the training kernels, and helpers of all launchers.

Shape letters: b samples, s positions, hq query heads, hk KV heads, d head size; `padded` is s
rounded up to whole tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from dms_train.kernels.options import ROW_TILE
from dms_train.kernels.train_attention.launch_plan import TilePlan
from dms_train.kernels.train_attention.triton_backward import finish_dq


class AttentionShape(NamedTuple):
    """Sizes and settings of one call.

    Attributes:
        b: Samples.
        s: Positions.
        hq: Query heads.
        hk: KV heads.
        d: Head size.
        window: Distance up to which a key is always visible, in tokens.
        scale: Factor on the scores.
        starts: int32 [s], first position of each query's document; None for one document.
        ends: int32 [s], end of each key's document.
        plan: Tiles and launch settings.
    """

    b: int
    s: int
    hq: int
    hk: int
    d: int
    window: int
    scale: float
    starts: Tensor | None
    ends: Tensor | None
    plan: TilePlan

    @property
    def padded(self) -> int:
        """Positions rounded up to whole tiles of queries."""
        return triton.cdiv(self.s, ROW_TILE) * ROW_TILE

    @property
    def n_blocks(self) -> int:
        """Tiles of keys."""
        return triton.cdiv(self.s, self.plan.forward.block_n)

    @property
    def width(self) -> int:
        """Head size of the tiles."""
        return max(16, triton.next_power_of_2(self.d))

    def section(self, bytes_per_channel: int) -> int:
        """Return the number of pairs of sample and KV head that run concurrently.

        Sections are equal in size. There are as few as possible, but the data of one section must
        fit two thirds of the second-level cache.

        Args:
            bytes_per_channel: Bytes per position and channel that one pair reads or adds to.
        """
        each = self.s * self.width * bytes_per_channel
        most = max(1, 2 * self.plan.cache_bytes // 3 // each)
        pairs = self.b * self.hk
        return triton.cdiv(pairs, triton.cdiv(pairs, most))

    @property
    def constants(self) -> dict[str, Any]:
        """Arguments of all kernels that attend."""
        packed = self.starts is not None
        return {"n_heads": self.hq, "group": self.hq // self.hk, "D": self.width, "PACKED": packed}


class Saved(NamedTuple):
    """Results of the forward pass that the backward pass needs, besides the output.

    Attributes:
        lse: float32 [b, hq, padded], log2 of the sums of exponentials.
        bias: float32 [b * hk, n_blocks * block], log2(e) log_keep.
        blocks: int32 [b * hk, n_blocks], tiles of keys that are not all evicted for good.
        counts: int32 [b * hk, n_blocks + 1], live tiles before each tile.
    """

    lse: Tensor
    bias: Tensor
    blocks: Tensor
    counts: Tensor


def aligned(x: Tensor) -> Tensor:
    """View x [b, s, h, d] as [b, h, s, d], with rows that can be copied 16 bytes at a time."""
    step = 16 // x.element_size()
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    strides = x.stride()[:-1]
    if not fits or any(stride % step or not stride for stride in strides):
        x = F.pad(x, (0, -x.shape[-1] % step)).contiguous()
    return x.transpose(1, 2)


def empty_in_order(x: Tensor) -> Tensor:
    """Allocate a dense tensor like x [b, s, h, d]; positions come first in memory if they do in x.

    Layers whose activations are [s, b, ...] then need no copy of the result.
    """
    b, s, h, d = x.shape
    if x.stride(0) < x.stride(1):
        return x.new_empty(s, b, h, d).transpose(0, 1)
    return x.new_empty(b, s, h, d)


def heads_per_program(p: AttentionShape) -> int:
    """Return the number of query heads that one program of the backward pass handles.

    A program takes all heads of a query group, so that their sums stay in registers. If processors
    would be idle, it takes fewer.
    """
    group = p.hq // p.hk
    programs = triton.cdiv(p.s, p.plan.backward.block_n) * p.b * p.hk
    return group if programs >= 2 * p.plan.processors else 1


def finished_dq(sums: Tensor, query: Tensor, p: AttentionShape) -> Tensor:
    """Return the gradient of the queries from `sums`, float32 [b, h, padded, d], any strides."""
    dq = torch.empty_like(query, memory_format=torch.contiguous_format)
    finish_dq[(p.b * p.hq, triton.cdiv(p.s, 64))](
        sums, dq, p.scale, p.s, *sums.stride()[1:], *dq.stride()[:3],
        n_heads=p.hq, D=p.width, SIZE=p.d, BLOCK=64,
    )  # fmt: skip
    return dq


def summed(
    dk: Tensor, dv: Tensor, d_log_keep: Tensor, key: Tensor, p: AttentionShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum gradients [b, s, parts, d] and [b, parts, s] over the parts of each KV head."""
    if dk.shape[2] == p.hk:
        return dk.contiguous(), dv.contiguous(), d_log_keep
    dk, dv = (x.unflatten(2, (p.hk, -1)).sum(3).to(key.dtype) for x in (dk, dv))
    return dk, dv, d_log_keep.unflatten(1, (p.hk, -1)).sum(2)
