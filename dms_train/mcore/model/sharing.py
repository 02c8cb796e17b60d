"""Teacher that shares the frozen weights of the student.

Weights that do not train are those of the original, so one copy serves both models. The teacher's
pass runs the student's own modules. Adapters are off, nothing is evicted, and trained projections
of attention are exchanged for their original tensors.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dms_train.mcore.layers import adapters
from dms_train.mcore.layers.attention import MethodState
from dms_train.mcore.layers.vocabulary_losses import Projection
from dms_train.mcore.model.model import DMSModel
from dms_train.mcore.model.weights import plain_name
from dms_train.mcore.options import Trainable
from dms_train.method.documents import PackedDocuments

_ATTENTION = ("linear_qkv", "linear_proj")


class _Original(NamedTuple):
    """Original tensor of a parameter that trains."""

    module: torch.nn.Module
    name: str
    tensor: torch.nn.Parameter


def freeze(models: list[Any], trainable: Trainable) -> None:
    """Let only the chosen weights train; the others get no gradients and no optimizer state."""
    if trainable.weights == "all":
        return
    for model in models:
        for name, parameter in model.named_parameters():
            trains = adapters.is_adapter(name) if trainable.adapts else _is_attention(name)
            parameter.requires_grad_(trains)


def _is_attention(name: str) -> bool:
    """Return whether a parameter is a weight or bias of the projections of attention."""
    module, _, parameter = plain_name(name).rpartition(".")
    return module.rpartition(".")[2] in _ATTENTION and parameter in ("weight", "bias")


class SharedTeacher:
    """Frozen original of a pipeline chunk, computed by the chunk's own modules.

    Args:
        model: The student, which has the weights of the original at this time.
        method: State of the original, which evicts nothing.
    """

    def __init__(self, model: DMSModel, method: MethodState) -> None:
        self._model, self._method = model, method
        self._originals = [
            _Original(module, name, _copy(parameter))
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad and not adapters.is_adapter(name)
        ]

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens as `DMSModel.embed`."""
        return self._model.embed(tokens)

    def run_layers(
        self,
        hidden: Tensor,
        eviction_stats: Tensor,
        noise_keys: Tensor | None,
        documents: PackedDocuments | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run the layers as `DMSModel.run_layers`, all at once, as the original."""
        with self._original():
            units = self._model.run_layers(hidden, eviction_stats, noise_keys, documents)
            (last,) = deque(units, maxlen=1)
        yield last

    def projection(self, hidden: Tensor) -> Projection:
        """Return the factors of the logits as `DMSModel.projection`."""
        return self._model.projection(hidden)

    @contextlib.contextmanager
    def _original(self) -> Iterator[None]:
        """Make the modules those of the original inside the block."""
        attentions = [layer.self_attention for layer in self._model.decoder.layers]
        student = self._model.method
        trained = [original.module._parameters[original.name] for original in self._originals]
        self._set(attentions, self._method, [original.tensor for original in self._originals])
        try:
            yield
        finally:
            self._set(attentions, student, trained)

    def _set(self, attentions: list[Any], method: MethodState, tensors: list[Any]) -> None:
        for attention in attentions:
            attention.method = method
        for projection in adapters.adapted([self._model]):
            projection.active = method is not self._method
        for original, tensor in zip(self._originals, tensors, strict=True):
            original.module._parameters[original.name] = tensor


def _copy(parameter: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(parameter.detach().clone(), requires_grad=False)
