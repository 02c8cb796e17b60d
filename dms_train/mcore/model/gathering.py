"""Gathering of whole Hugging Face tensors from a parallel layout, in shards for different ranks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dms_train.families import ParameterMap
from dms_train.families.decoder.parameters import LOCAL_EXPERTS
from dms_train.hf.architecture import Architecture
from dms_train.hf.tensors import expected_shapes
from dms_train.mcore import compat
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.model import mapping
from dms_train.mcore.model.weights import global_names, is_expert, is_vocabulary


class _Place(NamedTuple):
    """Position of a rank in the parallel layout."""

    pp: int
    tp: int
    dp: int  # among the ranks with the same weights


class _Stored(NamedTuple):
    """A parameter in the layout.

    Attributes:
        pp: First pipeline stage that holds it.
        ep: Rank that holds it among the ranks that share experts; None if all of them do.
        shape: Full shape, with padding.
        dtype: Dtype of the values.
    """

    pp: int
    ep: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Shard(NamedTuple):
    """Parameters whose tensors go to the rank at `place`."""

    number: int
    place: _Place
    entries: list[ParameterMap]


def gather(
    chunks: list[Any],
    architecture: Architecture,
    view: ParallelView,
    read: Callable[[Any], Tensor] = lambda parameter: parameter.data,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: float = math.inf,
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the shards of this rank as (number, Hugging Face tensors on the CPU).

    The shards divide the model in the order of its forward pass, in every layout alike. A shard
    goes to a rank of the pipeline stage that holds its first parameter. The ranks of a stage take
    turns, so that all ranks can write at the same time. Every rank must exhaust the iterator, also
    if it gets no shard. A single shard goes to rank 0. A shard is emptied when the next one is
    requested, so that one at a time takes memory.

    Args:
        chunks: This rank's unwrapped model chunks.
        architecture: Architecture of the model.
        view: Parallel layout.
        read: Function that returns a parameter's value, or its gradient in checks.
        dtype: Dtype of the tensors; None keeps theirs.
        shard_bytes: Maximum size of a shard, unless a single parameter is larger.
    """
    gatherer = _Gatherer(chunks, architecture, view, read)
    width = torch.float32.itemsize if dtype is None else dtype.itemsize
    for turn in gatherer.turns(_divide(architecture, width, shard_bytes)):
        own: tuple[int, dict[str, Tensor]] | None = None
        for shard in turn:
            tensors = gatherer.collect(shard, dtype)
            if shard.place == gatherer.place:
                own = shard.number, tensors
        if own is not None:
            yield own
            own[1].clear()


def gather_gradients(
    chunks: list[Any], optimizer: Any, architecture: Architecture, view: ParallelView
) -> dict[str, Tensor]:
    """Return reduced gradients by Hugging Face name on rank 0 (for checks of layouts)."""

    def whole(parameter: Any) -> Tensor:
        group = view.expert_dp_group if is_expert(parameter) else view.dp_cp_group
        return compat.reduced_gradient(optimizer, parameter, group)

    gradients = {
        parameter: whole(parameter) if parameter.requires_grad else torch.zeros_like(parameter)
        for chunk in chunks
        for parameter in chunk.parameters()
    }
    shards = gather(chunks, architecture, view, gradients.__getitem__)
    return {name: tensor for _, tensors in shards for name, tensor in tensors.items()}


def _divide(architecture: Architecture, width: int, limit: float) -> list[list[ParameterMap]]:
    """Cut the parameters into shards of at most `limit` bytes; a number takes `width` bytes."""
    shapes = expected_shapes(architecture)
    shards: list[list[ParameterMap]] = [[]]
    taken = 0
    together = architecture.described.stacked_experts

    def unit(entry: ParameterMap) -> str:
        """Name what a shard must hold whole: a parameter, or the experts of a layer."""
        layer, experts, _ = entry.megatron.partition(LOCAL_EXPERTS)
        return layer if experts and together else entry.megatron

    for _, group in groupby(mapping.entries(architecture), unit):
        entries = list(group)
        size = width * sum(math.prod(shapes[name]) for entry in entries for name in entry.hf)
        if shards[-1] and taken + size > limit:
            shards.append([])
            taken = 0
        shards[-1] += entries
        taken += size
    return shards


class _Gatherer:
    """Parameters of all ranks; every rank makes one and calls `collect` for every shard."""

    def __init__(
        self,
        chunks: list[Any],
        architecture: Architecture,
        view: ParallelView,
        read: Callable[[Any], Tensor],
    ) -> None:
        self.place = _Place(view.pp_rank, view.tp_rank, view.dp_cp_group.rank())
        self._architecture, self._view, self._read = architecture, view, read
        self._mine = {name: p for chunk in chunks for name, p in global_names(chunk).items()}
        self._ranks, self._stored = self._exchange()

    def _exchange(self) -> tuple[dict[_Place, int], dict[str, _Stored]]:
        """Return the rank at every place, and where every parameter is stored."""
        sends = self.place.dp < self._view.ep_size and self._view.tp_rank == 0
        described = {name: self._describe(p) for name, p in self._mine.items()} if sends else {}
        everyone: list[Any] = [None] * self._view.world_size
        dist.all_gather_object(everyone, (self.place, described))
        stored: dict[str, _Stored] = {}
        for _, parameters in everyone:
            stored = {**parameters, **stored}  # the first stage that has a parameter
        return {place: rank for rank, (place, _) in enumerate(everyone)}, stored

    def _describe(self, parameter: Any) -> _Stored:
        local = self._read(parameter)
        shape = list(local.shape)
        if getattr(parameter, "tensor_model_parallel", False):
            shape[parameter.partition_dim] *= self._view.tp_size
        ep = self._view.ep_rank if is_expert(parameter) else None
        return _Stored(self.place.pp, ep, tuple(shape), local.dtype)

    def turns(self, shards: list[list[ParameterMap]]) -> Iterator[list[_Shard]]:
        """Assign the shards to ranks; in each turn a rank gets one shard at most."""
        used: Counter[int] = Counter()
        turns: defaultdict[int, list[_Shard]] = defaultdict(list)
        for number, entries in enumerate(shards):
            stage = self._stored[entries[0].megatron].pp
            # first one rank of each data-parallel copy, because copies gather independently
            places = sorted(place for place in self._ranks if place.pp == stage)
            turn, index = divmod(used[stage], len(places))
            used[stage] += 1
            turns[turn].append(_Shard(number, places[index], entries))
        for turn in sorted(turns):
            yield turns[turn]

    def collect(self, shard: _Shard, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Gather one shard, and return its tensors on its rank."""
        tensors: dict[str, Tensor] = {}
        for entry in shard.entries:
            full = self._collect(entry, shard.place)
            if full is None or shard.place != self.place:
                continue
            full = full.to(dtype=dtype).cpu()
            for name, tensor in mapping.to_hf(entry, full, self._architecture).items():
                # a copy, because the halves of a gated matrix share their storage
                tensors[name] = tensor.clone()
        return tensors

    def _collect(self, entry: ParameterMap, place: _Place) -> Tensor | None:
        """Return a full parameter on the rank at `place`, and on its tensor-parallel peers."""
        view, stored = self._view, self._stored[entry.megatron]
        full = None
        source = place._replace(pp=stored.pp)
        if stored.ep is not None:
            source = source._replace(dp=place.dp - place.dp % view.ep_size + stored.ep)
        if self.place._replace(tp=source.tp) == source:
            full = self._unshard(entry, self._mine[entry.megatron])
        if source == place:
            return full
        if self.place == source and full is not None:
            dist.send(full.contiguous(), self._ranks[place])
        if self.place == place:
            full = torch.empty(self._shape(entry), dtype=stored.dtype, device=view.device)
            dist.recv(full, self._ranks[source])
        return full

    def _shape(self, entry: ParameterMap) -> tuple[int, ...]:
        """Return the full shape of a parameter, without the rows that pad the vocabulary."""
        shape = self._stored[entry.megatron].shape
        return (self._architecture.vocab_size, *shape[1:]) if is_vocabulary(entry.hf[0]) else shape

    def _unshard(self, entry: ParameterMap, parameter: Any) -> Tensor:
        local = self._read(parameter).detach().contiguous()
        parts = [torch.empty_like(local) for _ in range(self._view.tp_size)]
        dist.all_gather(parts, local, group=self._view.tp_group)
        if not getattr(parameter, "tensor_model_parallel", False):
            return parts[0]
        if entry.layout == "gated":
            return torch.cat([part.chunk(2)[half] for half in (0, 1) for part in parts])
        full = torch.cat(parts, parameter.partition_dim)
        return full[: self._shape(entry)[0]]
