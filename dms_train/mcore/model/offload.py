"""Teacher whose layers stay in host memory between passes.

The GPU holds the weights of two layers while a pass runs. A copy stream fills one of the two slots
while the layer in the other runs, and the student's layers in between. A CUDA graph captures the
copies with the passes. Embedding, final norm and output layer stay on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dms_train.mcore.layers.vocabulary_losses import Projection
from dms_train.mcore.model.model import DMSModel
from dms_train.mcore.options import OFFLOAD_SLOTS
from dms_train.method.documents import PackedDocuments

_ALIGNMENT = 128  # numbers: kernels load wide vectors, as from an allocation of their own


class _HostWeights:
    """Weights of a layer in one tensor in host memory, pinned if the layer is on a GPU."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._parameters = list(layer.parameters())
        self._starts, size = [], 0
        for parameter in self._parameters:
            self._starts.append(size)
            size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        first = self._parameters[0]
        self.flat = torch.empty(size, dtype=first.dtype, pin_memory=first.is_cuda)
        for parameter, view in zip(self._parameters, self._views(self.flat), strict=True):
            view.copy_(parameter.data)
        self.place(self.flat)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(self._starts, self._parameters, strict=True)
        ]

    def place(self, flat: Tensor) -> None:
        """Let the layer read its weights from `flat`, which has the size of the host's tensor."""
        for parameter, view in zip(self._parameters, self._views(flat), strict=True):
            parameter.data = view


class OffloadedTeacher:
    """Frozen chunk whose layers are on the device only while they run.

    Args:
        model: The chunk on its device; its layers have weights of one dtype.
        device: Device of the passes.
    """

    def __init__(self, model: DMSModel, device: torch.device) -> None:
        self._model, self._device = model, device
        self._layers = [_HostWeights(layer) for layer in model.decoder.layers]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots: list[Tensor] = []
        self._copied: list[Any] = [None] * OFFLOAD_SLOTS
        for number, layer in enumerate(model.decoder.layers):
            layer.register_forward_pre_hook(partial(self._wait, number))
            layer.register_forward_hook(partial(self._release, number))
        if self._stream is not None:
            torch.cuda.empty_cache()  # blocks of the moved weights, too small for the moments

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
        """Begin to copy the first layers, and run them as `DMSModel.run_layers`."""
        largest = max((host.flat for host in self._layers), key=Tensor.numel)
        # memory of this pass, so that the backward pass of the student can use it
        self._slots = [
            torch.empty(largest.shape, dtype=largest.dtype, device=self._device)
            for _ in range(OFFLOAD_SLOTS)
        ]
        for number in range(min(OFFLOAD_SLOTS, len(self._layers))):
            self._fetch(number)
        return self._model.run_layers(hidden, eviction_stats, noise_keys, documents)

    def projection(self, hidden: Tensor) -> Projection:
        """Return the factors of the logits as `DMSModel.projection`."""
        return self._model.projection(hidden)

    def _fetch(self, number: int) -> None:
        """Copy the weights of a layer into its slot, after all work queued so far."""
        host, index = self._layers[number], number % OFFLOAD_SLOTS
        slot = self._slots[index][: host.flat.numel()]
        if self._stream is None:
            slot.copy_(host.flat)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                slot.copy_(host.flat, non_blocking=True)
            self._copied[index] = self._stream.record_event()
        host.place(slot)

    def _wait(self, number: int, *_: Any) -> None:
        """Let a layer start when its weights have arrived."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied[number % OFFLOAD_SLOTS])

    def _release(self, number: int, *_: Any) -> None:
        """Give the slot of a layer that has run to a later layer, or free all after the last."""
        self._layers[number].place(self._layers[number].flat)
        if number + OFFLOAD_SLOTS < len(self._layers):
            self._fetch(number + OFFLOAD_SLOTS)
        elif number + 1 == len(self._layers):
            self._slots = []
