"""Linear layers whose tensor-parallel communication runs while their products are computed.

With sequence parallelism a column-parallel layer gathers its input over tensor-parallel ranks, and
a row-parallel layer sums its output and scatters it. `parallel.tp_comm_overlap` divides these
products by rank: a product that needs no transfer runs while the GPU's copy engines move what the
next one needs. The GPUs read one another's memory (torch's symmetric memory) without NVLink
multicast. On a CPU plain collectives run before or after the same products.

Shape letters: s positions, t tensor-parallel ranks, b samples, h hidden size, k inputs and n
outputs of a product on one rank.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from dms_train.mcore import compat


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _others(group: dist.ProcessGroup) -> list[int]:
    """List the other ranks in an order in which no two ranks read from the same one at a time."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


class _Slots:
    """Slots of the shape [s/t, b, h] on every GPU of a group, which the other GPUs can read.

    A gather uses slot 0. A scatter uses slots 1 to t - 1, so that it can run during a gather.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        self._shape, self._dtype = shape, dtype
        needed = group.size() * shape.numel() * dtype.itemsize
        self._memory = symmetric_memory.get_symm_mem_workspace(group.group_name, needed)

    def of(self, rank: int, slot: int) -> Tensor:
        """Return a slot of a rank as a tensor of this device."""
        first = slot * self._shape.numel()
        memory: Tensor = self._memory.get_buffer(rank, self._shape, self._dtype, first)
        return memory

    def meet(self) -> None:
        """Let the current stream wait until the current stream of every rank is here."""
        self._memory.barrier()


class Gathering:
    """Positions [s, b, h] of all ranks, which may still be in flight.

    Everything is waited for before the group begins another gather.

    Args:
        x: Positions of this rank [s/t, b, h].
        group: Tensor-parallel ranks.
        keeps: Whether `whole` will be called.
    """

    def __init__(self, x: Tensor, group: dist.ProcessGroup, *, keeps: bool) -> None:
        self._own, self._rank = x.contiguous(), group.rank()
        self._whole = x.new_empty(group.size() * len(x), *x.shape[1:])
        self._parts = self._whole.chunk(group.size())
        self._arrived: dict[int, torch.cuda.Event] = {}
        if x.is_cuda:
            self._copy(group, keeps=keeps)
        else:
            dist.all_gather_into_tensor(self._whole, self._own, group=group)

    def _copy(self, group: dist.ProcessGroup, *, keeps: bool) -> None:
        slots = _Slots(self._own.shape, self._own.dtype, group)
        slots.meet()  # all ranks have read what an earlier gather left in the slots
        slots.of(self._rank, 0).copy_(self._own)
        slots.meet()
        stream = _copy_stream(self._own.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for rank in _others(group):
                self._parts[rank].copy_(slots.of(rank, 0))
                self._arrived[rank] = stream.record_event()
            if keeps:
                self._parts[self._rank].copy_(self._own)
                self._arrived[self._rank] = stream.record_event()

    def part(self, rank: int) -> Tensor:
        """Return the positions of one rank [s/t, b, h]; the current stream waits for them."""
        if rank == self._rank:
            return self._own
        if rank in self._arrived:
            torch.cuda.current_stream().wait_event(self._arrived[rank])
        return self._parts[rank]

    def whole(self) -> Tensor:
        """Return all positions [s, b, h]; the current stream waits for them."""
        for event in self._arrived.values():
            torch.cuda.current_stream().wait_event(event)
        return self._whole


def gathered_product(gathering: Gathering, matrix: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Multiply each part of a gather when it arrives, [s, b, h] times [h, n] to [s, b, n]."""
    own = gathering.part(group.rank())
    product = own.new_empty(group.size(), *own.shape[:-1], matrix.shape[1])
    for rank in (group.rank(), *_others(group)):
        _multiply(gathering.part(rank), matrix, product[rank])
    return product.flatten(0, 1)


def scattered_product(x: Tensor, matrix: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Multiply, sum over ranks and scatter positions; transfers run during the next product.

    Args:
        x: All positions with the channels of this rank [s, b, k].
        matrix: Matrix of this rank [k, h].
        group: Tensor-parallel ranks.

    Returns:
        Sum over ranks for the positions of this rank [s/t, b, h].
    """
    parts = x.unflatten(0, (group.size(), -1))
    addends = x.new_empty(*parts.shape[:-1], matrix.shape[1])
    if not x.is_cuda:
        _multiply(parts, matrix, addends)
        total = torch.empty_like(addends[0])
        dist.reduce_scatter_tensor(total, addends.flatten(0, 1), group=group)
        return total
    slots = _Slots(addends.shape[1:], x.dtype, group)
    stream = _copy_stream(x.device)
    slots.meet()  # all ranks have read what an earlier scatter left in the slots
    for slot, rank in enumerate(_others(group), start=1):
        _multiply(parts[rank], matrix, slots.of(group.rank(), slot))
        slots.meet()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            source = (group.rank() - slot) % group.size()
            addends[slot].copy_(slots.of(source, slot))
    _multiply(parts[group.rank()], matrix, addends[0])
    torch.cuda.current_stream().wait_stream(stream)
    return addends.sum(0)


def _multiply(x: Tensor, matrix: Tensor, out: Tensor) -> None:
    """Write x [..., k] times matrix [k, n] to a contiguous tensor [..., n]."""
    torch.mm(x.flatten(0, -2), matrix, out=out.flatten(0, -2))


def _weight_gradient(weight: Tensor, x: Tensor, d_out: Tensor, accumulates: bool) -> Tensor | None:
    """Return d_out^T x, or a placeholder where the product adds it to `main_grad`."""
    inputs, outputs = x.flatten(0, -2), d_out.flatten(0, -2)
    if accumulates:
        return compat.add_to_main_grad(weight, inputs, outputs)
    return outputs.t() @ inputs


class _ColumnProduct(torch.autograd.Function):
    """Output [s, b, n] of x [s/t, b, h] and weight [n, h]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup, accumulates: bool
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.group, ctx.accumulates = group, accumulates
        return gathered_product(Gathering(x, group, keeps=False), weight.t(), group)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # begun before the product, which hides it
        gathering = None if x is None else Gathering(x, ctx.group, keeps=True)
        d_x = scattered_product(d_out, weight, ctx.group)
        d_weight = None
        if gathering is not None:
            d_weight = _weight_gradient(weight, gathering.whole(), d_out, ctx.accumulates)
        return d_x, d_weight, None, None


class _RowProduct(torch.autograd.Function):
    """Output [s/t, b, h], the sum over ranks, of x [s, b, k] and weight [h, k]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup, accumulates: bool
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.group, ctx.accumulates = group, accumulates
        return scattered_product(x, weight.t(), group)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gathering = Gathering(d_out, ctx.group, keeps=x is not None)
        d_x = gathered_product(gathering, weight, ctx.group)
        d_weight = None
        if x is not None:
            d_weight = _weight_gradient(weight, x, gathering.whole(), ctx.accumulates)
        return d_x, d_weight, None, None


def _apply(function: type[torch.autograd.Function], layer: Any, x: Tensor) -> Any:
    """Return output and bias of a linear layer, as megatron's layers do."""
    accumulates = layer.gradient_accumulation_fusion and hasattr(layer.weight, "main_grad")
    output = function.apply(x, layer.weight, layer.tp_group, accumulates)
    if layer.bias is None or layer.skip_bias_add:
        return output, layer.bias
    return output + layer.bias, None


class ColumnLinear(ColumnParallelLinear):
    """Megatron's layer, which overlaps its communication if `tp_comm_overlap` is set."""

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Map [s/t, b, h], or [s, b, h] without sequence parallelism, to [s, b, n]."""
        if not self.config.tp_comm_overlap:
            return super().forward(input_, *args, **kwargs)
        return _apply(_ColumnProduct, self, input_)


class RowLinear(RowParallelLinear):
    """Megatron's layer, which overlaps its communication if `tp_comm_overlap` is set."""

    def forward(self, input_: Tensor) -> Any:
        """Map [s, b, k] to [s/t, b, h], or to [s, b, h] without sequence parallelism."""
        if not self.config.tp_comm_overlap:
            return super().forward(input_)
        return _apply(_RowProduct, self, input_)
