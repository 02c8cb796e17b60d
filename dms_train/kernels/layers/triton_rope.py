"""RoPE with the eviction channel scaled and read out, in one pass over q, k and v each way.

The kernels compute the same as the plain operations of `mcore`, but in float32 throughout; `mcore`
rounds intermediate results to the tensors' dtype. RoPE is linear, so only cosines and sines are
saved for the backward pass.

Shape letters: s positions, b samples, g KV heads, r query heads per KV head, d head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from dms_train.kernels.layers.types import EvictionChannel

_ROWS = 32


class Heads(NamedTuple):
    """Query [s, b, g, r, d], key and value [s, b, g, d], or their gradients; d has stride 1.

    The value is copied; None leaves it out.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None = None

    def strides(self) -> tuple[int, ...]:
        """Strides of all dimensions except the last."""
        of_value = (0, 0, 0) if self.value is None else self.value.stride()[:3]
        return (*self.query.stride()[:4], *self.key.stride()[:3], *of_value)


@triton.jit
def _turn(x, y, cos, sin, first, second, gain_first, gain_second):
    """Apply RoPE to one head, with factors on each half and on its share of the other half."""
    x, y = x * first, y * second
    return x * cos - y * sin * gain_first, y * cos + x * sin * gain_second


@triton.jit
def rotate_eviction_channel(
    q_ptr, k_ptr, v_ptr, q_out, k_out, v_out, channel_ptr, table_ptr, factor, rows, batch,
    q_s, q_b, q_g, q_r, k_s, k_b, k_g, v_s, v_b, v_g,
    qo_s, qo_b, qo_g, qo_r, ko_s, ko_b, ko_g, vo_s, vo_b, vo_g,
    R: tl.constexpr, HALF: tl.constexpr, CHANNEL: tl.constexpr, CLEAR: tl.constexpr,
    BACKWARD: tl.constexpr, HAS_EVICTION_CHANNEL: tl.constexpr, PACKED: tl.constexpr,
    LOADS_FACTOR: tl.constexpr, HAS_VALUE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of one KV group for ROWS tokens; backward by the transposed matrix.

    Where HAS_VALUE, copy the group's value.
    """
    group, groups = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    s, b = row // batch, row % batch
    c = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (c < HALF)[None, :]
    at = (row if PACKED else s)[:, None] * (2 * HALF) + c[None, :]
    cos = tl.load(table_ptr + at, mask=inside, other=0.0)
    sin = tl.load(table_ptr + at + HALF, mask=inside, other=0.0)
    q_at = (s * q_s + b * q_b + group * q_g)[:, None] + c[None, :]
    qo_at = (s * qo_s + b * qo_b + group * qo_g)[:, None] + c[None, :]
    one = tl.full([WIDTH], 1.0, tl.float32)
    is_eviction_channel = c == CHANNEL % HALF
    if LOADS_FACTOR:
        factor = tl.load(factor)
    at_channel = tl.where(is_eviction_channel, factor, one)
    first = at_channel if CHANNEL < HALF else one
    second = one if CHANNEL < HALF else at_channel
    gain_first = first if CLEAR else one
    gain_second = second if CLEAR else one
    if BACKWARD:
        sin = -sin
    for head in tl.static_range(R):
        x = tl.load(q_ptr + q_at + head * q_r, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(q_ptr + q_at + head * q_r + HALF, mask=inside, other=0.0).to(tl.float32)
        if head > 0:
            u, v = _turn(x, y, cos, sin, 1.0, 1.0, 1.0, 1.0)
        elif BACKWARD:
            u = (x * cos - y * sin * gain_second[None, :]) * first[None, :]
            v = (y * cos + x * sin * gain_first[None, :]) * second[None, :]
            if HAS_EVICTION_CHANNEL:
                raw = tl.load(channel_ptr + row * groups + group, mask=row < rows, other=0.0)
                added = tl.where(is_eviction_channel[None, :], raw[:, None], 0.0)
                u, v = (u + added, v) if CHANNEL < HALF else (u, v + added)
        else:
            u, v = _turn(
                x, y, cos, sin, first[None, :], second[None, :],
                gain_first[None, :], gain_second[None, :],
            )  # fmt: skip
            raw = tl.sum(tl.where(is_eviction_channel[None, :], x if CHANNEL < HALF else y, 0.0), 1)
            tl.store(channel_ptr + row * groups + group, raw, mask=row < rows)
        tl.store(q_out + qo_at + head * qo_r, u.to(q_out.dtype.element_ty), mask=inside)
        tl.store(q_out + qo_at + head * qo_r + HALF, v.to(q_out.dtype.element_ty), mask=inside)
    k_at = (s * k_s + b * k_b + group * k_g)[:, None] + c[None, :]
    ko_at = (s * ko_s + b * ko_b + group * ko_g)[:, None] + c[None, :]
    x = tl.load(k_ptr + k_at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(k_ptr + k_at + HALF, mask=inside, other=0.0).to(tl.float32)
    u, v = _turn(x, y, cos, sin, 1.0, 1.0, 1.0, 1.0)
    tl.store(k_out + ko_at, u.to(k_out.dtype.element_ty), mask=inside)
    tl.store(k_out + ko_at + HALF, v.to(k_out.dtype.element_ty), mask=inside)
    if HAS_VALUE:
        v_at = (s * v_s + b * v_b + group * v_g)[:, None] + c[None, :]
        vo_at = (s * vo_s + b * vo_b + group * vo_g)[:, None] + c[None, :]
        x = tl.load(v_ptr + v_at, mask=inside)
        y = tl.load(v_ptr + v_at + HALF, mask=inside)
        tl.store(v_out + vo_at, x, mask=inside)
        tl.store(v_out + vo_at + HALF, y, mask=inside)


def _launch(
    source: Heads,
    target: Heads,
    eviction_channel: Tensor | None,
    table: Tensor,
    settings: EvictionChannel,
    backward: bool,
) -> None:
    s, b, g, r, d = source.query.shape
    half = d // 2
    rotate_eviction_channel[(triton.cdiv(s * b, _ROWS), g)](
        *source, *target, eviction_channel, table, settings.factor, s * b, b,
        *source.strides(), *target.strides(),
        R=r, HALF=half, CHANNEL=settings.channel, CLEAR=settings.clear_after_rope,
        BACKWARD=backward, HAS_EVICTION_CHANNEL=eviction_channel is not None,
        PACKED=table.dim() == 4, LOADS_FACTOR=isinstance(settings.factor, Tensor),
        HAS_VALUE=source.value is not None, ROWS=_ROWS, WIDTH=triton.next_power_of_2(half),
    )  # fmt: skip


def rope_table(frequencies: Tensor) -> Tensor:
    """Return cosines and sines, float32 [s, 2, d / 2], of megatron's frequencies [s, 1, 1, d]."""
    half = frequencies.flatten(1)[:, : frequencies.shape[-1] // 2].float()
    return torch.stack([half.cos(), half.sin()], dim=1)


def _rows_of_channels(gradient: Tensor, shape: Any) -> Tensor:
    x = gradient.view(shape) if gradient.is_contiguous() else gradient.reshape(shape)
    return x if x.stride(-1) == 1 else x.contiguous()


class _Rotate(torch.autograd.Function):
    """Differentiable RoPE of query [s, b, g, r, d] and key [s, b, g, d]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, table: Tensor, eviction_channel: EvictionChannel
    ) -> Any:
        s, b, g, r, d = ctx.shape = query.shape
        out = Heads(query.new_empty(ctx.shape), key.new_empty(s, b, g, d))
        raw = table.new_empty(s, b, g)
        _launch(Heads(query, key), out, raw, table, eviction_channel, backward=False)
        ctx.save_for_backward(table)
        ctx.eviction_channel = eviction_channel
        ctx.set_materialize_grads(False)
        return out.query.view(s, b, g * r, d), out.key, raw

    @staticmethod
    @once_differentiable  # the kernels record no graph
    def backward(ctx: Any, d_query: Tensor, d_key: Tensor, d_raw: Tensor | None) -> Any:
        s, b, g, _, d = ctx.shape
        out = Heads(d_query.new_empty(ctx.shape), d_key.new_empty(s, b, g, d))
        _turn_back(ctx, (d_query, d_key), d_raw, out)
        return out.query, out.key, None, None


class _SplitAndRotate(torch.autograd.Function):
    """Differentiable RoPE of a projection [s, b, g, r + 2, d]: query group, key and value."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, table: Tensor, eviction_channel: EvictionChannel) -> Any:
        s, b, g, heads, d = mixed.shape
        ctx.shape = (s, b, g, heads - 2, d)
        query, key, value = (mixed.new_empty(s, b, g * n, d) for n in (heads - 2, 1, 1))
        raw = table.new_empty(s, b, g)
        out = Heads(query.view(ctx.shape), key, value)
        _launch(_parts(mixed), out, raw, table, eviction_channel, backward=False)
        ctx.save_for_backward(table)
        ctx.eviction_channel = eviction_channel
        ctx.set_materialize_grads(False)
        return query, key, value, raw

    @staticmethod
    @once_differentiable  # the kernels record no graph
    def backward(
        ctx: Any, d_query: Tensor, d_key: Tensor, d_value: Tensor, d_raw: Tensor | None
    ) -> Any:
        s, b, g, r, d = ctx.shape
        d_mixed = d_query.new_empty(s, b, g, r + 2, d)
        _turn_back(ctx, (d_query, d_key, d_value), d_raw, _parts(d_mixed))
        return d_mixed, None, None


def _parts(mixed: Tensor) -> Heads:
    return Heads(mixed[..., :-2, :], mixed[..., -2, :], mixed[..., -1, :])


def _turn_back(ctx: Any, gradients: tuple[Tensor, ...], d_raw: Tensor | None, out: Heads) -> None:
    (table,) = ctx.saved_tensors
    d_query, *others = gradients
    given = Heads(
        _rows_of_channels(d_query, ctx.shape), *(_rows_of_channels(d, d.shape) for d in others)
    )
    d_raw = None if d_raw is None else d_raw.contiguous()
    _launch(given, out, d_raw, table, ctx.eviction_channel, backward=True)


def rotate(
    query: Tensor, key: Tensor, table: Tensor, eviction_channel: EvictionChannel
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply RoPE to queries and keys; scale and read out the eviction channel.

    Args:
        query: [s, b, g, r, d].
        key: [s, b, g, d].
        table: From `rope_table`; contiguous [s, b, 2, d / 2] if each sample has its own rows.
        eviction_channel: Scaling of the eviction channel.

    Returns:
        Query [s, b, g * r, d], key [s, b, g, d] and the unscaled eviction channel, float32 [s, b,
        g].
    """
    return _Rotate.apply(query, key, table, eviction_channel)


def split_and_rotate(
    mixed: Tensor, table: Tensor, eviction_channel: EvictionChannel
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply `rotate` to a projection [s, b, g, r + 2, d]; also return value [s, b, g, d]."""
    return _SplitAndRotate.apply(mixed, table, eviction_channel)
