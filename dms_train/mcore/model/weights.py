"""Loading of sharded weights, one Hugging Face tensor at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from dms_train.families import ParameterMap
from dms_train.families.decoder.parameters import LOCAL_EXPERTS
from dms_train.hf.architecture import Architecture
from dms_train.hf.errors import HFError
from dms_train.hf.tensor_values import is_finite
from dms_train.hf.tensors import expected_shapes
from dms_train.mcore import groups
from dms_train.mcore.errors import ModelError
from dms_train.mcore.groups import ParallelView
from dms_train.mcore.layers import adapters
from dms_train.mcore.layers.layer_spec import PLAIN_NAMES
from dms_train.mcore.model import mapping


class WeightSource(Protocol):
    """Source of Hugging Face tensors by name.

    Both functions raise HFError when a tensor cannot be used.
    """

    def get(self, name: str) -> Tensor:
        """Return the full tensor."""
        ...

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return the indices from `start` to `stop` of one dimension."""
        return self.get(name).narrow(dim, start, stop - start)


class RandomWeights(WeightSource):
    """Initial weights of a model trained from scratch, the same in every parallel layout."""

    def __init__(self, architecture: Architecture, seed: int, std: float) -> None:
        self._shapes = expected_shapes(architecture)
        self._norm = 0.0 if architecture.described.centered_norms else 1.0
        self._seed, self._std = seed, std
        self._output_std = std / (2 * architecture.num_layers) ** 0.5

    def get(self, name: str) -> Tensor:
        """Return norms of factor 1, biases of 0, normal matrices; scale outputs by depth.

        Linear attention forgets at rates between 1 and 16, and its taps do not change the scale.
        """
        shape = self._shapes[name]
        if name.endswith((".dt_bias", "linear_attn.norm.weight")):
            return torch.ones(shape)
        if name.endswith(".A_log"):
            return torch.linspace(1.0, 16.0, *shape).log()
        if name.endswith("norm.weight"):
            return torch.full(shape, self._norm)
        if name.endswith(".bias"):
            return torch.zeros(shape)
        residual = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
        # torch's generator on the CPU reads the lower 32 bits of its seed only
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), self._seed))
        std = self._output_std if residual else self._std
        std = shape[-1] ** -0.5 if "conv1d" in name else std
        return torch.randn(shape, generator=generator) * std


def plain_name(name: str) -> str:
    """Return a parameter's name with separate norms, for either implementation of layers."""
    for fused, plain in PLAIN_NAMES.items():
        name = name.replace(fused, plain)
    return name


def global_names(chunk: Any) -> dict[str, Tensor]:
    """Return a chunk's parameters by plain name with global numbers of layers and experts."""
    named = {}
    for full, parameter in chunk.named_parameters():
        name = plain_name(full)
        name_parts = name.split(".")
        if name_parts[:2] == ["decoder", "layers"]:
            layer = chunk.decoder.layers[int(name_parts[2])]
            name_parts[2] = str(layer.layer_number - 1)
            if name_parts[3:6] == LOCAL_EXPERTS.split("."):
                name_parts[6] = str(layer.mlp.local_expert_indices[int(name_parts[6])])
        named[".".join(name_parts)] = parameter
    return named


def is_vocabulary(name: str) -> bool:
    """Return whether a Hugging Face tensor has a row for every token."""
    return name in ("model.embed_tokens.weight", "lm_head.weight")


def is_expert(parameter: Any) -> bool:
    """Return whether the parameter is of an expert, which expert parallelism divides."""
    return not getattr(parameter, "allreduce", True)  # megatron's mark of such parameters


def load(
    chunks: list[Any], source: WeightSource, architecture: Architecture, view: ParallelView
) -> None:
    """Fill this rank's chunks; reads only the part of each tensor that the rank holds.

    Raises:
        ModelError: On every rank alike, when any rank cannot use a tensor. It has another shape
            than the configuration states, or holds NaN or infinite numbers.
    """
    with _agreed():
        table = {entry.megatron: entry for entry in mapping.entries(architecture)}
        if architecture.tie_word_embeddings:
            embedding = table["embedding.word_embeddings.weight"]
            table["output_layer.weight"] = ParameterMap("output_layer.weight", embedding.hf)
        shapes = expected_shapes(architecture)
        for chunk in chunks:
            for name, parameter in global_names(chunk).items():
                if adapters.is_adapter(name):
                    continue
                hf_tensors = [
                    _part(source, hf, shapes[hf], parameter, view) for hf in table[name].hf
                ]
                local = mapping.to_megatron(table[name], hf_tensors, architecture)
                parameter.data[: local.shape[0]].copy_(local)
                parameter.data[local.shape[0] :].zero_()  # rows that pad the vocabulary


def initialize_adapters(chunks: list[Any], view: ParallelView, seed: int) -> None:
    """Make the adapters of frozen weights compute nothing yet, alike in every parallel layout.

    A is uniform as in PEFT, B zero, and the eviction channels have the rows of the frozen weights.
    """
    for chunk in chunks:
        for name, parameter in global_names(chunk).items():
            if adapters.is_adapter(name):
                parameter.data.zero_()
            if name.endswith("_down"):
                parameter.data.copy_(_random_part(name, parameter, view, seed))
    for projection in adapters.channel_adapters(chunks):
        projection.read_channel()


def _random_part(name: str, parameter: Any, view: ParallelView, seed: int) -> Tensor:
    """Return this rank's part of uniform numbers within the inverse root of the input size."""
    rank, inputs = parameter.shape
    sharded = getattr(parameter, "tensor_model_parallel", False)
    first = view.tp_rank * inputs if sharded else 0
    total = inputs * (view.tp_size if sharded else 1)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
    whole = (2 * torch.rand(rank, total, generator=generator) - 1) / total**0.5
    return whole[:, first : first + inputs]


def require_finite(chunks: list[Any], where: str) -> None:
    """Refuse loaded weights that are not finite; `where` starts the message.

    Raises:
        ModelError: On every rank alike, with the first parameter that holds NaN or infinities.
    """
    with _agreed():
        for chunk in chunks:
            for name, parameter in global_names(chunk).items():
                if not is_finite(parameter.data):
                    raise ModelError(
                        f"{where}: {name} holds NaN or infinite numbers; use another checkpoint"
                    )


@contextmanager
def _agreed() -> Iterator[None]:
    """Raise the first rank's refusal on every rank, because the others wait in a collective."""
    problem = None
    try:
        yield
    except (HFError, ModelError) as error:
        problem = str(error)
    for reported_problem in groups.values(problem):
        if reported_problem is not None:
            raise ModelError(reported_problem)


def _part(
    source: WeightSource, name: str, shape: tuple[int, ...], parameter: Any, view: ParallelView
) -> Tensor:
    """Read this rank's part of one tensor, without the rows that pad a vocabulary."""
    if not getattr(parameter, "tensor_model_parallel", False) or view.tp_size == 1:
        return _checked(name, source.get(name), shape)
    dim = parameter.partition_dim
    # a vocabulary is padded to a multiple of the ranks; other sizes are divisible by them
    size = parameter.shape[dim] if is_vocabulary(name) else shape[dim] // view.tp_size
    start, stop = (min((view.tp_rank + i) * size, shape[dim]) for i in (0, 1))
    wanted = (*shape[:dim], stop - start, *shape[dim + 1 :])
    if start == stop:
        return torch.empty(wanted)
    return _checked(name, source.part(name, dim, start, stop), wanted)


def _checked(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"weights: {name} has shape {tuple(tensor.shape)}, config.json states {shape}; "
            "the checkpoint and its config.json do not belong together"
        )
    return tensor


def copy(students: list[Any], teachers: list[Any]) -> None:
    """Copy the weights of model chunks into chunks of the same layout."""
    for student, teacher in zip(students, teachers, strict=True):
        own = global_names(student)
        for name, parameter in global_names(teacher).items():
            parameter.data.copy_(own[name].data)
