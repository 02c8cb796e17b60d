"""Fused causal attention with a soft eviction bias for training.

Hopper GPUs run kernels scheduled by hand for head sizes up to 128; everything else, and the
deterministic mode of torch, runs the portable ones. Memory grows with the length, not its square.

Shape letters: b samples, s positions, hq query heads, hk KV heads, d head size; `padded` is s
rounded up to whole tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from dms_train.kernels.errors import KernelError
from dms_train.kernels.train_attention import triton_backward as gradients
from dms_train.kernels.train_attention.dense import causal_attention
from dms_train.kernels.train_attention.documents import document_of, require_one_sample
from dms_train.kernels.train_attention.launch_plan import plan_tiles
from dms_train.kernels.train_attention.triton_forward import attend, prepare_bias
from dms_train.kernels.train_attention.triton_shape import (
    AttentionShape,
    Saved,
    aligned,
    empty_in_order,
    finished_dq,
    heads_per_program,
    summed,
)

_LOG2E = 1.4426950408889634


def dms_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_keep: Tensor | None,
    window: int | None,
    scale: float,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention with a soft eviction bias; see `interface.DMSAttention`.

    float16, bfloat16 or float32; log_keep is read as float32. Without a bias torch's own fused
    attention is called unless documents are packed.

    Raises:
        KernelError: Several packed samples, no window, or a head size above 256.
    """
    if window is None:
        raise KernelError("kernels=triton: has no bias that grows with distance; use kernels=auto")
    if log_keep is None and cu_seqlens is None and sinks is None:
        return causal_attention(query, key, value, scale)
    if log_keep is None:
        b, s, hk = key.shape[:3]
        log_keep = torch.zeros(b, hk, s, device=key.device)
    sinks = None if sinks is None else sinks.float()
    inputs = query, key, value, log_keep.float(), sinks, window, scale, cu_seqlens
    if torch.compiler.is_compiling() or type(query) is not Tensor:  # such as a fake tensor
        return _operator(*inputs)[0]
    return _Attention.apply(*inputs)


class _Attention(torch.autograd.Function):
    """Run the operators below without torch's dispatcher; its host overhead exceeds theirs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _attend(*inputs)
        _save(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable  # the kernels record no graph, so a second derivative would lack terms
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        return _differentiated(_attend_backward, ctx, d_out)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_keep: Tensor,
    sinks: Tensor | None,
    window: int,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    problem = _problem((query, key, value), window, scale, cu_seqlens)
    out = empty_in_order(query)
    saved = _empty_saved(query, problem)
    _prepare(log_keep.contiguous(), saved, problem)
    if problem.plan.hopper:
        from dms_train.kernels.train_attention import triton_hopper as triton_train_hopper

        triton_train_hopper.forward(query, key, value, out, saved, problem)
    else:
        _forward(query, key, value, out, saved, problem)
    if sinks is not None:
        _add_sinks(out, saved.lse, sinks)
    return out, *saved


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add the sinks [hq] to the denominators of out [b, s, hq, d] and of lse; both are updated.

    The backward kernels then need no change: they read lse and products with the output only.
    """
    lse = lse[..., : out.shape[1]]
    whole = torch.logaddexp2(lse, sinks[:, None] * _LOG2E)
    out.mul_(torch.exp2(lse - whole).transpose(1, 2)[..., None])
    lse.copy_(whole)


def _attend_backward(
    inputs: list[Tensor],
    saved: list[Tensor],
    d_out: Tensor,
    sinks: Tensor | None,
    window: int,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value, out = inputs
    problem = _problem((query, key, value), window, scale, cu_seqlens)
    kept = Saved(*saved)
    delta = torch.empty_like(kept.lse)
    rows, d_rows = (_descriptor(x, 64, problem.width) for x in (out, d_out))
    gradients.row_dots[(problem.b * problem.hq, problem.padded // 64)](
        rows, d_rows, delta, problem.s, problem.padded, problem.hq, D=problem.width, BLOCK=64
    )
    d_sinks = query.new_zeros(0, dtype=torch.float32)
    if sinks is not None:
        share = torch.exp2(sinks[:, None] * _LOG2E - kept.lse[..., : problem.s])
        d_sinks = -(share * delta[..., : problem.s]).sum((0, 2))
    if problem.plan.hopper and not torch.are_deterministic_algorithms_enabled():
        from dms_train.kernels.train_attention import triton_hopper as triton_train_hopper

        d_heads = triton_train_hopper.backward(query, key, value, d_out, kept, delta, problem)
    else:
        d_heads = _backward(query, key, value, d_out, kept, delta, problem)
    return *d_heads, d_sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, _, sinks, ctx.window, ctx.scale, ctx.cu_seqlens = inputs
    ctx.save_for_backward(sinks, query, key, value, *output)


def _differentiated(
    backward: Callable[..., tuple[Tensor, ...]], ctx: Any, d_out: Tensor
) -> tuple[Tensor | None, ...]:
    sinks, query, key, value, out, *saved = ctx.saved_tensors
    *d_heads, d_sinks = backward(
        [query, key, value, out], saved, d_out, sinks, ctx.window, ctx.scale, ctx.cu_seqlens
    )
    return *d_heads, None if sinks is None else d_sinks, None, None, None


_operator = torch.library.custom_op("dms_train::attention", mutates_args=())(_attend)
_operator_backward = torch.library.custom_op("dms_train::attention_backward", mutates_args=())(
    _attend_backward
)


@_operator.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_keep: Tensor,
    sinks: Tensor | None,
    window: int,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    problem = _problem((query, key, value), window, scale, cu_seqlens, fake=True)
    return empty_in_order(query), *_empty_saved(query, problem)


@_operator_backward.register_fake
def _(
    inputs: list[Tensor],
    saved: list[Tensor],
    d_out: Tensor,
    sinks: Tensor | None,
    window: int,
    scale: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value, _ = inputs
    b, s, hk = key.shape[:3]
    dense = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3]]
    d_log_keep = query.new_empty((b, hk, s), dtype=torch.float32)
    d_sinks = query.new_empty(0 if sinks is None else len(sinks), dtype=torch.float32)
    return dense[0], dense[1], dense[2], d_log_keep, d_sinks


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, d_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return _differentiated(_operator_backward, ctx, d_out)


_operator.register_autograd(_differentiate, setup_context=_setup)


def _problem(
    heads: tuple[Tensor, Tensor, Tensor],
    window: int,
    scale: float,
    cu_seqlens: Tensor | None,
    fake: bool = False,
) -> AttentionShape:
    query, key, value = heads
    b, s, hq, d = query.shape
    if not query.dtype == key.dtype == value.dtype:
        raise KernelError(
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}: "
            "the fused kernels take one dtype"
        )
    plan = plan_tiles(query.dtype, int(d), query.device)
    starts = ends = None
    if cu_seqlens is not None:
        require_one_sample(query, cu_seqlens)
        starts, ends = (None, None) if fake else _document_bounds(cu_seqlens, s)
    # no distance is larger than s; sums of positions and the window stay far from overflowing
    window = min(window, s)
    return AttentionShape(b, s, hq, key.shape[2], d, window, scale, starts, ends, plan)


def _document_bounds(cu_seqlens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return first position and end of every position's document, int32 [length]."""
    bounds = cu_seqlens.int()
    document = document_of(cu_seqlens, length)
    return bounds[document], bounds[document + 1]


def _empty_saved(query: Tensor, p: AttentionShape) -> Saved:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return query.new_empty(shape, dtype=dtype)

    return Saved(
        empty(p.b, p.hq, p.padded),
        empty(p.b * p.hk, p.n_blocks * p.plan.forward.block_n),
        empty(p.b * p.hk, p.n_blocks, dtype=torch.int32),
        empty(p.b * p.hk, p.n_blocks + 1, dtype=torch.int32),
    )


def _prepare(log_keep: Tensor, saved: Saved, p: AttentionShape) -> None:
    count = triton.next_power_of_2(p.n_blocks)
    prepare_bias[(p.b * p.hk,)](
        log_keep, *saved[1:], p.s, p.n_blocks, BLOCK=p.plan.forward.block_n, N=count
    )


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """View x [b, s, h, d] as [b, h, s, d] in tiles of rows x columns."""
    view = aligned(x)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), [1, 1, rows, columns])


def _writable(x: Tensor) -> Tensor:
    """Allocate a buffer like x [b, s, h, d] that a descriptor can write; return its d channels."""
    step = 16 // x.element_size()
    return x.new_empty(*x.shape[:-1], x.shape[-1] + -x.shape[-1] % step)


def _forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Saved, p: AttentionShape) -> None:
    t = p.plan.forward
    target = out if aligned(out).data_ptr() == out.data_ptr() else _writable(out)
    attend[(triton.cdiv(p.s, t.block_m) * p.b * p.hq,)](
        _descriptor(q, t.block_m, p.width),
        _descriptor(k, t.block_n, p.width),
        _descriptor(v, t.block_n, p.width),
        _descriptor(target, t.block_m, p.width),
        saved.bias, saved.lse, saved.blocks, saved.counts, p.starts,
        p.scale, p.s, p.padded, p.n_blocks, p.window, p.section(4),
        **p.constants, BLOCK_M=t.block_m, BLOCK_N=t.block_n, PRECISION=p.plan.precision,
        STAGES=t.stages, num_warps=t.warps,
    )  # fmt: skip
    if target is not out:
        out.copy_(target[..., : p.d])


def _backward(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, saved: Saved, delta: Tensor, p: AttentionShape
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    t, per_program = p.plan.backward, heads_per_program(p)
    num_groups = p.hq // per_program
    exact = torch.are_deterministic_algorithms_enabled()
    dq_sums = q.new_zeros(
        *((1, 1, 1, 4) if exact else (p.b, p.hq, p.d, p.padded)), dtype=torch.float32
    )
    dtype = k.dtype if num_groups == p.hk else torch.float32
    dk, dv = (_writable(k.new_empty(p.b, p.s, num_groups, p.d, dtype=dtype)) for _ in range(2))
    d_log_keep = k.new_empty(p.b, num_groups, p.s, dtype=torch.float32)
    block = [1, 1, p.width, t.block_m]
    gradients.attend_backward[(triton.cdiv(p.s, t.block_n) * p.b * num_groups,)](
        _descriptor(q, t.block_m, p.width),
        _descriptor(k, t.block_n, p.width),
        _descriptor(v, t.block_n, p.width),
        _descriptor(d_out, t.block_m, p.width),
        TensorDescriptor(dq_sums, list(dq_sums.shape), list(dq_sums.stride()), block),
        _descriptor(dk, t.block_n, p.width),
        _descriptor(dv, t.block_n, p.width),
        dq_sums, saved.bias, d_log_keep, saved.lse, delta, saved.counts, p.ends,
        p.scale, p.s, p.padded, p.n_blocks, p.window, p.section(8),
        **p.constants, per_program=per_program, SIZE=p.d, BLOCK_M=t.block_m, BLOCK_N=t.block_n,
        LIST_BLOCK=p.plan.forward.block_n, DQ=not exact, BULK=p.plan.bulk_sums,
        PRECISION=p.plan.precision, STAGES=t.stages, num_warps=t.warps,
    )  # fmt: skip
    if exact:
        dq = _exact_dq(q, k, v, d_out, saved, delta, p)
    else:
        dq = finished_dq(dq_sums.transpose(2, 3), q, p)
    return dq, *summed(dk[..., : p.d], dv[..., : p.d], d_log_keep, k, p)


def _exact_dq(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, saved: Saved, delta: Tensor, p: AttentionShape
) -> Tensor:
    t = p.plan.forward
    stages = min(t.stages, 2)  # the kernel holds more tiles at a time than the forward pass
    dq = _writable(q)
    gradients.query_gradient[(triton.cdiv(p.s, t.block_m) * p.b * p.hq,)](
        _descriptor(q, t.block_m, p.width),
        _descriptor(k, t.block_n, p.width),
        _descriptor(v, t.block_n, p.width),
        _descriptor(d_out, t.block_m, p.width),
        _descriptor(dq, t.block_m, p.width),
        saved.bias, saved.lse, delta, saved.blocks, saved.counts, p.starts,
        p.scale, p.s, p.padded, p.n_blocks, p.window, p.section(4),
        **p.constants, BLOCK_M=t.block_m, BLOCK_N=t.block_n, PRECISION=p.plan.precision,
        STAGES=stages, num_warps=t.warps,
    )  # fmt: skip
    return dq[..., : p.d].contiguous()
