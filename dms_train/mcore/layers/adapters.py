"""Trained parameters beside frozen projections of attention: LoRA, and eviction channels.

A projection W x becomes W x + alpha / rank * B (A x). The rows of the eviction channels are
replaced by trained rows, so that they can be reset without a change of W. With `active` unset the
projections compute W x, which is the original model's.

Letters: s positions, b samples, h hidden size, g KV heads of this rank, q and d query and key rows
of a KV head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from dms_train.mcore.layers.overlap import ColumnLinear, RowLinear
from dms_train.mcore.options import Trainable
from dms_train.method.layer import MethodLayer


class LowRank(NamedTuple):
    """Change of a Hugging Face projection: `scale * up @ down`, in float32.

    Attributes:
        down: A of all ranks [rank, inputs].
        up: B of all ranks [outputs, rank].
        bias: Bias that replaces the frozen one [outputs]; None if it does not change.
        replaced: Frozen rows that are replaced [rows, inputs], in order and in their own dtype.
    """

    down: Tensor
    up: Tensor
    bias: Tensor | None
    replaced: Tensor


_LORA, _CHANNEL = "lora_", "channel_"  # prefixes of the trained parameters
_OUTPUT = "o"


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2].startswith((_LORA, _CHANNEL))


class _Adapted(torch.nn.Module):
    """Common part of the adapted projections.

    Attributes:
        active: Whether the adapter takes part in the forward pass.
    """

    tp_axes: dict[str, int]
    input_size: int
    output_size: int
    output_size_per_partition: int
    input_size_per_partition: int
    weight: Tensor
    bias: Tensor | None
    config: Any
    tp_group: dist.ProcessGroup

    def begin(self, trainable: Trainable, axes: dict[str, int]) -> None:
        """Prepare for `add`; `axes` are those of the projection's own parameters."""
        self.active = True
        self.trainable = trainable
        self.tp_axes = axes
        self._frozen: dict[str, Tensor] = {}

    def add(self, name: str, shape: tuple[int, ...], axis: int | None = None) -> None:
        """Register a parameter of zeros, sharded over tensor-parallel ranks along `axis`.

        An empty one is a constant, which DDP, optimizer and checkpoint do not see.
        """
        values = self.weight.new_zeros(shape)
        if not values.numel():
            self.register_buffer(name, values, persistent=False)
            return
        parameter = torch.nn.Parameter(values)
        if axis is None:
            # each rank has the gradient of its own tokens, which Megatron adds up
            setattr(parameter, "sequence_parallel", self.config.sequence_parallel)  # noqa: B010
        else:
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)
            self.tp_axes[name] = axis
        self.register_parameter(name, parameter)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the entries of a checkpoint; without those of a merged adapter."""
        state = self.state_dict(prefix="", keep_vars=True)
        if self._frozen:
            state = {name: value for name, value in state.items() if not is_adapter(name)}
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            self.tp_axes,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )

    def merged_tensors(self) -> dict[str, Tensor]:
        """Return weight and bias that compute the same without an adapter, in float32."""
        raise NotImplementedError

    def merge(self) -> None:
        """Replace the frozen tensors by `merged_tensors`, until `unmerge`."""
        for name, tensor in self.merged_tensors().items():
            parameter = getattr(self, name)
            self._frozen[name] = parameter.data
            parameter.data = tensor.to(parameter.dtype)
        self.active = False

    def unmerge(self) -> None:
        """Undo `merge`; the frozen tensors are the same memory as before."""
        for name, tensor in self._frozen.items():
            getattr(self, name).data = tensor
        self._frozen.clear()
        self.active = True

    def low_rank(self) -> Iterator[tuple[str, LowRank]]:
        """Yield the change of every projection that has one, whole on every tensor-parallel rank.

        Every tensor-parallel rank exhausts the iterator.
        """
        raise NotImplementedError

    def _whole(self, name: str) -> Tensor:
        """Return a parameter in float32, gathered if tensor parallelism divides it."""
        own = getattr(self, name).detach().float()
        return self._gathered(own, self.tp_axes[name]) if name in self.tp_axes else own

    def _gathered(self, own: Tensor, axis: int = 0) -> Tensor:
        """Join the tensors of all tensor-parallel ranks along `axis`; empty ones stay empty."""
        if not own.numel():
            return own
        own = own.contiguous()
        everyone = [torch.empty_like(own) for _ in range(self.tp_group.size())]
        dist.all_gather(everyone, own, group=self.tp_group)
        return torch.cat(everyone, axis)

    def _product(self, target: str) -> Tensor:
        """Return alpha / rank * B A of one target in float32."""
        up, down = (getattr(self, f"{_LORA}{target}_{part}").float() for part in ("up", "down"))
        return self.trainable.lora.scale * (up @ down)


def _with_product(output: Tensor, low: Tensor, up: Tensor, trainable: Trainable) -> Tensor:
    """Return output + alpha / rank * low B^T, rounded once: [s * b, n].

    Args:
        output: [s, b, n].
        low: [s, b, ranks].
        up: B of the ranks, [n, ranks].
        trainable: Scale of the adapters.
    """
    flat, low = output.flatten(0, 1), low.flatten(0, 1)
    return torch.addmm(flat, low, up.t(), alpha=trainable.lora.scale)


class AdaptedQKV(_Adapted, ColumnLinear):
    """Query, key and value projection with adapters and trained rows of the eviction channels.

    Args:
        trainable: Adapters to build.
        layer: Method, which has the eviction channels; None in a layer without decisions.
    """

    rows: Tensor
    channel_weight: Tensor
    channel_bias: Tensor

    def __init__(
        self, *args: Any, trainable: Trainable, layer: MethodLayer | None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.begin(trainable, {"weight": 0, "bias": 0})
        c = self.config
        query = c.num_attention_heads // c.num_query_groups * c.kv_channels
        gate = {"gate": query} if c.attention_output_gate else {}
        self.parts = {"q": query, **gate, "k": c.kv_channels, "v": c.kv_channels}
        self.groups = self.output_size_per_partition // sum(self.parts.values())
        rank = trainable.lora.rank
        for target in self._targets:
            self.add(f"{_LORA}{target}_down", (rank, self.input_size))
            self.add(f"{_LORA}{target}_up", (self.groups * self.parts[target], rank), 0)
        channel_rows = () if layer is None else self.channel_rows(layer)
        own = self.groups * len(channel_rows)
        self.add("channel_weight", (own * self.tp_group.size(), self.input_size))
        if self.bias is not None:
            self.add("channel_bias", (own * self.tp_group.size(),))
        self.register_buffer("rows", torch.empty(0, dtype=torch.int64), persistent=False)
        self.set_rows(channel_rows)

    @property
    def _targets(self) -> list[str]:
        return [target for target in self.trainable.targets if target in self.parts]

    @property
    def _own(self) -> slice:
        """This rank's part of the channel's parameters, which every rank holds whole."""
        first = self.tp_group.rank() * len(self.rows)
        return slice(first, first + len(self.rows))

    def channel_rows(self, layer: MethodLayer) -> tuple[int, ...]:
        """Return the rows of a method's channels within the rows of a KV head."""
        return tuple(layer.channel_rows(self.parts["q"], self.config.kv_channels))

    def set_rows(self, channel_rows: tuple[int, ...]) -> None:
        """Choose the rows that the channel's parameters replace."""
        width = sum(self.parts.values())
        rows = [group * width + row for group in range(self.groups) for row in channel_rows]
        self.rows = torch.tensor(rows, dtype=torch.int64, device=self.weight.device)

    @torch.no_grad()
    def read_channel(self) -> None:
        """Copy the rows of the frozen tensors; every tensor-parallel rank calls it."""
        for name in ("weight", "bias") if self.bias is not None else ("weight",):
            own = getattr(self, name)[self.rows]
            getattr(self, f"{_CHANNEL}{name}").copy_(self._gathered(own))

    def channel_parameters(self) -> list[Tensor]:
        """Return the parameters that produce the eviction channels, and nothing else."""
        return [self.channel_weight] + ([] if self.bias is None else [self.channel_bias])

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Map [s, b, h] to [s, b, g (q + 2 d)] as megatron's layer, and add the adapters."""
        output, bias = super().forward(input_, *args, **kwargs)
        return (self._adapt(input_, output) if self.active else output), bias

    def _adapt(self, x: Tensor, output: Tensor) -> Tensor:
        # one narrow product for all, whose gradient alone the ranks add up
        downs = [getattr(self, f"{_LORA}{target}_down") for target in self._targets]
        bias = None
        if self.bias is not None:
            bias = F.pad(self.channel_bias, (sum(len(down) for down in downs), 0))
        low = F.linear(x, torch.cat([*downs, self.channel_weight]), bias)
        if self.config.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        ranks = low.shape[-1] - len(self.channel_weight)
        # a copy, because autograd keeps it, and a view would keep the whole narrow product
        channel = low[..., ranks:][..., self._own].contiguous()
        if not ranks:
            return output.index_copy(-1, self.rows, channel)
        flat = _with_product(output, low[..., :ranks], self._ups(), self.trainable)
        if len(self.rows):
            flat = flat.index_copy_(-1, self.rows, channel.flatten(0, 1))
        return flat.view_as(output)

    def _ups(self) -> Tensor:
        """Return B of all targets as one matrix [g (q + 2 d), ranks], with zeros elsewhere."""
        rank, targets = self.trainable.lora.rank, self._targets
        blocks = []
        for target, size in self.parts.items():
            if target in targets:
                up = getattr(self, f"{_LORA}{target}_up").unflatten(0, (self.groups, size))
                first = targets.index(target)
                blocks.append(F.pad(up, (rank * first, rank * (len(targets) - 1 - first))))
            else:
                blocks.append(self.weight.new_zeros(self.groups, size, rank * len(targets)))
        return torch.cat(blocks, 1).flatten(0, 1)

    @torch.no_grad()
    def merged_tensors(self) -> dict[str, Tensor]:
        """Return weight and bias that compute the same without an adapter, in float32."""
        whole = self.weight.float()
        grouped = whole.unflatten(0, (self.groups, -1)).split(list(self.parts.values()), 1)
        parts = [
            part + self._product(target).view_as(part) if target in self._targets else part
            for target, part in zip(self.parts, grouped, strict=True)
        ]
        merged = {"weight": torch.cat(parts, 1).flatten(0, 1)}
        merged["weight"][self.rows] = self.channel_weight[self._own].float()
        if self.bias is not None:
            merged["bias"] = self.bias.float().index_copy(
                0, self.rows, self.channel_bias[self._own].float()
            )
        return merged

    @torch.no_grad()
    def low_rank(self) -> Iterator[tuple[str, LowRank]]:
        """Yield the changes of q, k and v; a replaced row has a rank of its own."""
        frozen = self._gathered(self.weight.detach()[self.rows])
        difference = self.channel_weight.float() - frozen.float()
        first = 0
        for target, size in self.parts.items():
            index, rows = self._replaced(first, size)
            down, up = self._factors(target, size)
            select = up.new_zeros(len(up), len(rows))
            select[rows, torch.arange(len(rows), device=rows.device)] = (
                1 / self.trainable.lora.scale
            )
            down = torch.cat([down, difference[index]])
            up = torch.cat([up.index_fill(0, rows, 0.0), select], 1)
            if len(down):
                bias = self._replaced_bias(first, size, index, rows)
                yield target, LowRank(down, up, bias, frozen[index])
            first += size

    def _factors(self, target: str, size: int) -> tuple[Tensor, Tensor]:
        """Return A [rank, inputs] and B [outputs, rank], of rank 0 for other projections."""
        if target in self._targets:
            return self._whole(f"{_LORA}{target}_down"), self._whole(f"{_LORA}{target}_up")
        outputs = self.groups * self.tp_group.size() * size
        empty = self.weight.new_empty
        return empty(0, self.input_size).float(), empty(outputs, 0).float()

    def _replaced(self, first: int, size: int) -> tuple[Tensor, Tensor]:
        """Find the replaced rows of a projection.

        Args:
            first: First row of the projection within the rows of a KV head.
            size: Its rows of a KV head.

        Returns:
            Their indices among the channel's parameters, and their rows in the projection.
        """
        own = self.rows[: len(self.rows) // self.groups]
        groups = torch.arange(self.groups * self.tp_group.size(), device=own.device)
        index = ((own >= first) & (own < first + size)).repeat(len(groups)).nonzero().flatten()
        rows = groups[:, None] * size + own - first
        return index, rows.flatten()[index]

    def _replaced_bias(self, first: int, size: int, index: Tensor, rows: Tensor) -> Tensor | None:
        """Return the bias of a projection with `_replaced` rows; None if it does not change."""
        if self.bias is None or not len(rows):
            return None
        whole = self._gathered(self.bias.detach()).float()
        frozen = whole.unflatten(0, (-1, sum(self.parts.values())))[:, first : first + size]
        return frozen.flatten().index_copy(0, rows, self.channel_bias.float()[index])


class AdaptedOutput(_Adapted, RowLinear):
    """Output projection of attention with an adapter."""

    lora_o_down: Tensor
    lora_o_up: Tensor

    def __init__(self, *args: Any, trainable: Trainable, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.begin(trainable, {"weight": 1})
        rank = trainable.lora.rank
        self.add(f"{_LORA}{_OUTPUT}_down", (rank, self.input_size_per_partition), 1)
        self.add(f"{_LORA}{_OUTPUT}_up", (self.output_size, rank))

    def forward(self, input_: Tensor) -> Any:
        """Map [s, b, heads of this rank] to [s, b, h] as megatron's layer, and add the adapter."""
        output, bias = super().forward(input_)
        if not self.active:
            return output, bias
        low = F.linear(input_, self.lora_o_down)
        if self.config.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
        total = _with_product(output, low, self.lora_o_up, self.trainable)
        return total.view_as(output), bias

    @torch.no_grad()
    def merged_tensors(self) -> dict[str, Tensor]:
        """Return the weight that computes the same without an adapter, in float32."""
        return {"weight": self.weight.float() + self._product(_OUTPUT)}

    @torch.no_grad()
    def low_rank(self) -> Iterator[tuple[str, LowRank]]:
        """Yield the change of the projection."""
        down, up = (self._whole(f"{_LORA}{_OUTPUT}_{part}") for part in ("down", "up"))
        yield _OUTPUT, LowRank(down, up, None, down[:0])


def adapted(models: list[Any]) -> Iterator[Any]:
    """Yield the adapted projections of model chunks."""
    for model in models:
        for layer in model.decoder.layers:
            yield from _adapted(layer)


def _adapted(layer: Any) -> Iterator[Any]:
    """Yield the adapted projections of a layer; one with linear attention has none."""
    attention = layer.self_attention
    for name in ("linear_qkv", "linear_proj"):
        projection = getattr(attention, name, None)
        if isinstance(projection, _Adapted):
            yield projection


def low_rank_changes(models: list[Any]) -> Iterator[tuple[int, str, LowRank]]:
    """Yield (layer, projection, change) of model chunks; every tensor-parallel rank exhausts it."""
    for layer in (layer for model in models for layer in model.decoder.layers):
        for projection in _adapted(layer):
            for target, change in projection.low_rank():
                yield layer.layer_number - 1, target, change


def channel_adapters(models: list[Any]) -> Iterator[AdaptedQKV]:
    """Yield the query, key and value projections of model chunks that have eviction channels."""
    yield from (p for p in adapted(models) if isinstance(p, AdaptedQKV) and len(p.rows))


@contextlib.contextmanager
def merged(models: list[Any]) -> Iterator[None]:
    """Compute, save and export the models without adapters inside the block."""
    projections = list(adapted(models))
    for projection in projections:
        projection.merge()
    try:
        yield
    finally:
        for projection in projections:
            projection.unmerge()
