"""Weights in and out of the sharded model, one Hugging Face tensor at a time."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dms_train.families import ParameterMap
from dms_train.hf.architecture import Architecture
from dms_train.hf.tensors import expected_shapes
from dms_train.mcore.errors import ModelError
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers.layer_spec import FUSED_NAMES
from dms_train.mcore.model import mapping


class WeightSource(Protocol):
    """Anything that gives a full Hugging Face tensor by name."""

    def get(self, name: str) -> Tensor:
        """The tensor; raises a ValueError that names it when absent."""
        ...


class RandomWeights:
    """Initial weights of a model trained from scratch, the same in every parallel layout."""

    def __init__(self, architecture: Architecture, seed: int, std: float) -> None:
        self._shapes = expected_shapes(architecture)
        self._seed, self._std = seed, std
        self._output_std = std / (2 * architecture.num_layers) ** 0.5

    def get(self, name: str) -> Tensor:
        """Norms are 1, biases 0, matrices normal; residual outputs scaled down by depth."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith(".bias"):
            return torch.zeros(shape)
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        # torch's generator on the CPU reads the lower 32 bits of its seed only
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), self._seed))
        std = self._output_std if residual else self._std
        return torch.randn(shape, generator=generator) * std


def plain_name(name: str) -> str:
    """A parameter's name with separate norms, in either implementation of the layers."""
    for plain, fused in FUSED_NAMES.items():
        name = name.replace(fused, plain)
    return name


def global_names(chunk: Any) -> dict[str, Tensor]:
    """Parameters of one model chunk by plain name with the global layer number."""
    named = {}
    for full, parameter in chunk.named_parameters():
        name = plain_name(full)
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
        named[".".join(parts)] = parameter
    return named


def _is_vocabulary(name: str) -> bool:
    return name in ("embedding.word_embeddings.weight", "output_layer.weight")


def _shard(entry: ParameterMap, parameter: Any, full: Tensor, view: ParallelView) -> Tensor:
    """This tensor-parallel rank's part of a full Megatron tensor."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    dim = parameter.partition_dim
    if entry.layout == "gated":
        return torch.cat([half.chunk(view.tp_size, dim)[view.tp_rank] for half in full.chunk(2)])
    if _is_vocabulary(entry.megatron):
        missing = parameter.shape[0] * view.tp_size - full.shape[0]
        full = torch.nn.functional.pad(full, (0, 0, 0, missing))
    return full.chunk(view.tp_size, dim)[view.tp_rank]


def _unshard(
    entry: ParameterMap, parameter: Any, shards: list[Tensor], architecture: Architecture
) -> Tensor:
    if not getattr(parameter, "tensor_model_parallel", False):
        return shards[0]
    if entry.layout == "gated":
        return torch.cat([s.chunk(2)[half] for half in (0, 1) for s in shards])
    full = torch.cat(shards, parameter.partition_dim)
    return full[: architecture.vocab_size] if _is_vocabulary(entry.megatron) else full


def load(
    chunks: list[Any], source: WeightSource, architecture: Architecture, view: ParallelView
) -> None:
    """Fill this rank's chunks; reads only the tensors the rank holds.

    Raises:
        ModelError: A tensor is absent or has another shape than the configuration states.
    """
    table = {entry.megatron: entry for entry in mapping.entries(architecture)}
    shapes = expected_shapes(architecture)
    if architecture.tie_word_embeddings:
        embedding = table["embedding.word_embeddings.weight"]
        table["output_layer.weight"] = ParameterMap("output_layer.weight", embedding.hf)
    for chunk in chunks:
        for name, parameter in global_names(chunk).items():
            tensors = [_checked(source, hf, shapes[hf]) for hf in table[name].hf]
            full = mapping.to_megatron(table[name], tensors, architecture)
            parameter.data.copy_(_shard(table[name], parameter, full, view))


def _checked(source: WeightSource, name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = source.get(name)
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"weights: {name} has shape {tuple(tensor.shape)}, config.json states {shape}; "
            "the checkpoint and its config.json do not belong together"
        )
    return tensor


def gather(
    chunks: list[Any],
    architecture: Architecture,
    view: ParallelView,
    read: Callable[[Any], Tensor] = lambda parameter: parameter.data,
) -> Iterator[tuple[str, Tensor]]:
    """Full Hugging Face tensors on the CPU of rank 0, one Megatron parameter at a time.

    Every rank must exhaust the iterator; the others yield nothing.

    Args:
        chunks: This rank's unwrapped model chunks.
        architecture: Of the model.
        view: Parallel layout.
        read: What to read of each parameter: its value, or its gradient in checks.
    """
    mine = {name: p for chunk in chunks for name, p in global_names(chunk).items()}
    owners = _owners(mine, read, view)
    for entry in mapping.entries(architecture):
        owner, shape, dtype = owners[entry.megatron]
        full: Tensor | None = None
        if entry.megatron in mine and view.dp_rank == 0 and view.pp_rank == owner[0]:
            full = _gather_tensor_parallel(entry, mine[entry.megatron], read, architecture, view)
        if view.rank == owner[1] and view.rank != 0 and full is not None:
            dist.send(full.contiguous(), 0)
        if view.rank == 0:
            if full is None:
                if _is_vocabulary(entry.megatron):
                    shape = (architecture.vocab_size, *shape[1:])
                full = torch.empty(shape, dtype=dtype, device=view.device)
                dist.recv(full, owner[1])
            yield from mapping.to_hf(entry, full.cpu(), architecture).items()
        # in lockstep: no rank waits longer than rank 0 takes to write one shard
        dist.barrier()


def _gather_tensor_parallel(
    entry: ParameterMap,
    parameter: Any,
    read: Callable[[Any], Tensor],
    architecture: Architecture,
    view: ParallelView,
) -> Tensor:
    local = read(parameter).detach().contiguous()
    shards = [torch.empty_like(local) for _ in range(view.tp_size)]
    dist.all_gather(shards, local, group=view.tp_group)
    return _unshard(entry, parameter, shards, architecture)


def _owners(
    mine: dict[str, Any], read: Callable[[Any], Tensor], view: ParallelView
) -> dict[str, tuple[tuple[int, int], tuple[int, ...], torch.dtype]]:
    """For each parameter: ((stage, rank) of the first owner, full padded shape, dtype)."""
    described = {}
    for name, parameter in mine.items():
        local = read(parameter)
        shape = list(local.shape)
        if getattr(parameter, "tensor_model_parallel", False):
            shape[parameter.partition_dim] *= view.tp_size
        described[name] = (tuple(shape), local.dtype)
    sends = view.dp_rank == 0 and view.tp_rank == 0
    everyone: list[Any] = [None] * view.world_size
    dist.all_gather_object(everyone, (view.pp_rank, described) if sends else None)
    owners: dict[str, Any] = {}
    for rank, answer in enumerate(everyone):
        for name, (shape, dtype) in answer[1].items() if answer else ():
            owners.setdefault(name, ((answer[0], rank), shape, dtype))
    return owners
