"""Optimizer state in checkpoints, as blocks of whole parameters, without gathering it.

Megatron's distributed optimizer gives every data rank a run of elements of each flattened
parameter. Its own form of checkpoint that fits any layout, `fully_reshardable`, first gathers all
runs onto every data rank. Here each rank writes its run as at most three rectangles of the
parameter: the end of a row, whole rows, the start of a row. It uses the same keys, and reads back
exactly the rectangles it needs; torch's distributed checkpoints cut and join rectangles of any
grid. Checkpoints of the two forms are read alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import KEEP_VARS_HINT
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

from dms_train.mcore import compat

_STATES = ("param", "exp_avg", "exp_avg_sq")


class _Block(NamedTuple):
    """Part of a run: elements `start` to `end` of it, a rectangle at `offset` of its piece."""

    start: int
    end: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def keep_shards(optimizer: Any) -> None:
    """Make this optimizer write and read its `fully_reshardable` checkpoints in blocks."""
    for part in compat.optimizer_parts(optimizer):
        part.sharded_param_state_fully_reshardable = partial(_param_state, part)
        part.load_parameter_state_from_fully_reshardable = (
            part.load_parameter_state_from_fs_model_space
        )


def _param_state(
    part: Any,
    model_sharded_state_dict: dict[str, Any],
    is_loading: bool = False,
    metadata: dict[str, Any] | None = None,
) -> dict[int, dict[str, ShardedTensorFactory]]:
    """Return the state of each parameter that this rank holds elements of, in Megatron's order."""
    state: dict[int, dict[str, ShardedTensorFactory]] = {}
    for parameter, shard, first in _held(part, model_sharded_state_dict):
        tensors = compat.parameter_state(part, parameter)
        state[len(state)] = {
            name: _in_blocks(name, tensors[name], shard, first, is_loading) for name in _STATES
        }
    return state


def _held(part: Any, models: dict[str, Any]) -> Iterator[tuple[Any, Any, int]]:
    """Yield each parameter with elements here, its entry of the checkpoint, the first element."""
    sharded, _ = extract_sharded_tensors_and_factories(models)
    shard_of = {shard.data: shard for shard in nested_values(sharded)}
    for ranges in part.gbuf_ranges:
        for bucket in (bucket for buckets in ranges.values() for bucket in buckets):
            for parameter, held in bucket["param_map"].items():
                if parameter not in shard_of:
                    raise ValueError(f"a parameter has no place: {KEEP_VARS_HINT}")
                yield parameter, shard_of[parameter], held["param"].start


class Masters:
    """This rank's fp32 weights in the optimizer, loaded from a checkpoint without its moments."""

    KEY = "optimizer.state.param."

    def __init__(self, optimizer: Any, models: dict[str, Any], stored: Collection[str]) -> None:
        """Take the weights whose keys are in `stored`.

        Args:
            optimizer: The optimizer, whose state exists.
            models: Sharded entries of the model chunks.
            stored: Keys of the checkpoint, which begin with `KEY`.
        """
        self._tensors: dict[str, Tensor] = {}
        self.sharded: dict[str, ShardedTensorFactory] = {}
        for number, part in enumerate(compat.optimizer_parts(optimizer)):
            for index, (parameter, shard, first) in enumerate(_held(part, models)):
                if f"{self.KEY}{shard.key}" not in stored:
                    continue
                name, run = f"{number}.{index}", compat.parameter_state(part, parameter)["param"]
                self._tensors[name] = run
                self.sharded[name] = _in_blocks("param", run, shard, first, is_loading=True)

    def set(self, loaded: dict[str, Tensor]) -> None:
        """Copy what `dist_checkpointing.load` returned for `sharded`."""
        for name, run in self._tensors.items():
            run.detach().copy_(loaded[name])


def _in_blocks(
    name: str, run: Tensor, shard: Any, first: int, is_loading: bool
) -> ShardedTensorFactory:
    """Divide a run of elements, from the `first` of its parameter, into blocks."""
    pieces = [shard] if isinstance(shard, ShardedTensor) else list(nested_values(shard.build()))
    data = torch.empty_like(run, device="cpu") if is_loading else run.detach()

    def build(key: str, tensor: Tensor, replica_id: Any, _range: Any) -> list[ShardedTensor]:
        return list(_blocks_of(key, tensor, pieces, first, replica_id))

    return ShardedTensorFactory(
        key=f"optimizer.state.{name}.{shard.key}",
        data=data,
        build_fn=build,
        merge_fn=lambda blocks: torch.cat([block.reshape(-1) for block in blocks]),
        # exactly one data rank holds each element
        replica_id=(*shard.replica_id[:2], 0),
    )


def _blocks_of(
    key: str, run: Tensor, pieces: list[ShardedTensor], first: int, replica_id: Any
) -> Iterator[ShardedTensor]:
    """Divide a run into blocks of the parameter's pieces, such as gate and up."""
    begin = 0
    for piece in pieces:
        size = prod(piece.local_shape)
        low, high = max(first, begin), min(first + run.numel(), begin + size)
        for block in blocks(low - begin, high - begin, piece.local_shape) if low < high else ():
            own = run[begin + block.start - first : begin + block.end - first]
            shape = (1,) * piece.prepend_axis_num + block.shape
            inner = (0,) * piece.prepend_axis_num + block.offset
            yield replace(
                piece,
                key=key,
                data=own.view(shape),
                dtype=run.dtype,
                local_shape=shape,
                global_offset=tuple(
                    outer + add for outer, add in zip(piece.global_offset, inner, strict=True)
                ),
                axis_fragmentations=None,
                replica_id=replica_id,
                prepend_axis_num=0,
            )
        begin += size


def blocks(start: int, end: int, shape: tuple[int, ...]) -> list[_Block]:
    """Divide elements `start` to `end` (above `start`) of a flattened tensor into rectangles.

    Args:
        start: First element.
        end: Index after the last element.
        shape: Shape of the tensor, one or two axes.
    """
    if len(shape) == 1:
        return [_Block(start, end, (start,), (end - start,))]
    _, width = shape
    first_whole, last_whole = -(-start // width), end // width
    if first_whole > last_whole:  # the run lies within one row
        return [_Block(start, end, (last_whole, start % width), (1, end - start))]
    rectangles = []
    if start % width:
        rectangles.append(
            _Block(
                start, first_whole * width, (first_whole - 1, start % width), (1, -start % width)
            )
        )
    if first_whole < last_whole:
        rows = last_whole - first_whole
        rectangles.append(
            _Block(first_whole * width, last_whole * width, (first_whole, 0), (rows, width))
        )
    if end % width:
        rectangles.append(_Block(last_whole * width, end, (last_whole, 0), (1, end % width)))
    return rectangles
