"""Launchers of the kernels for Hopper; `triton_attention` decides when to use them."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dms_train.kernels.train_attention import triton_hopper_backward as triton_train_hopper_backward
from dms_train.kernels.train_attention import triton_hopper_forward as triton_train_hopper_forward
from dms_train.kernels.train_attention.triton_shape import (
    AttentionShape,
    Saved,
    aligned,
    finished_dq,
    heads_per_program,
    summed,
)

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
# Registers of a thread while twelve warps start; computing warps take more afterwards.
_REGISTERS = 168


def forward_registers(block_n: int, width: int) -> tuple[int, int]:
    """Return the registers of a thread of the forward pass at its start, and while it computes.

    With few, two programs run on a multiprocessor; tiles of 64 keys and 64 channels need no more.
    """
    return (80, 104) if block_n * width <= 64 * 64 else (_REGISTERS, 240)


@functools.cache  # called at every launch
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), _TYPES[dtype])


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    layout = _layout(tuple(block), x.dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def _tiles(x: Tensor, rows: int, p: AttentionShape) -> TensorDescriptor:
    """View x [b, s, h, d] as [b, h, s, d] in tiles of `rows` rows."""
    return _descriptor(aligned(x), [1, 1, rows, p.width])


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved, p: AttentionShape) -> None:
    """Fill out [b, s, h, d] and saved.lse."""
    t = p.plan.forward
    half = t.block_m // 2
    registers, computing = forward_registers(t.block_n, p.width)
    target = out
    if p.d % 8:
        target = out.new_empty(*out.shape[:-1], p.d + -p.d % 8)
    triton_train_hopper_forward.attend[(triton.cdiv(p.s, t.block_m) * p.b * p.hq,)](
        _tiles(q, half, p), _tiles(k, t.block_n, p), _tiles(v, t.block_n, p),
        _tiles(target, half, p), _descriptor(saved.bias.view(-1), [t.block_n]),
        saved.lse, saved.blocks, saved.counts, p.starts,
        p.scale, p.s, p.padded, p.n_blocks, p.window, p.section(4),
        **p.constants, HALF=half, BLOCK_N=t.block_n, STAGES=t.stages, REGISTERS=computing,
        num_warps=t.warps, maxnreg=registers,
    )  # fmt: skip
    if target is not out:
        out.copy_(target[..., : p.d])


def backward(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, saved: Saved, delta: Tensor, p: AttentionShape
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v [b, s, h, d] and of log_keep [b, hk, s]."""
    t, per_program = p.plan.backward, heads_per_program(p)
    num_groups = p.hq // per_program
    dq_sums = q.new_zeros(p.b, p.hq, p.padded, p.d, dtype=torch.float32)
    dtype = k.dtype if num_groups == p.hk else torch.float32
    dk, dv = (k.new_empty(p.b, p.s, num_groups, p.d, dtype=dtype) for _ in range(2))
    d_log_keep = k.new_empty(p.b, num_groups, p.s, dtype=torch.float32)
    triton_train_hopper_backward.attend_backward[(triton.cdiv(p.s, t.block_n) * p.b * num_groups,)](
        _tiles(q, t.block_m, p), _tiles(k, t.block_n, p), _tiles(v, t.block_n, p),
        _tiles(d_out, t.block_m, p), _descriptor(saved.lse.view(-1), [t.block_m]),
        _descriptor(delta.view(-1), [t.block_m]), dq_sums, dk, dv,
        dk.stride(0), dk.stride(2), dk.stride(1), saved.bias, d_log_keep, saved.counts, p.ends,
        p.scale, p.s, p.padded, p.n_blocks, p.window, p.section(8),
        **p.constants, per_program=per_program, SIZE=p.d, BLOCK_M=t.block_m, BLOCK_N=t.block_n,
        LIST_BLOCK=p.plan.forward.block_n, STAGES=t.stages, WARPS=t.warps,
        num_warps=t.warps, maxnreg=_REGISTERS,
    )  # fmt: skip
    return finished_dq(dq_sums, q, p), *summed(dk, dv, d_log_keep, k, p)
