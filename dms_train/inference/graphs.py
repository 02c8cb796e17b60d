"""Decode steps replayed as CUDA graphs: one launch instead of several hundred.

A graph holds whole steps: the layers, the logits and the next token of every sequence, which the
next step reads without the host. It is captured at the start for every batch size that is a power
of two, with one step and with a group of them, with and without top-k, top-p and min-p; unused
places hold row -1, which the kernels skip.
The cache never moves, so that the graphs stay valid. In Triton's interpreter, on a CPU, the same
steps run without graphs.

Shape letters: b sequences of a step, k steps of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dms_train.inference import devices
from dms_train.inference.cache.interface import CapturableCache
from dms_train.inference.decode_inputs import (
    FIELDS,
    LIMITED_FIELDS,
    ROWS,
    DecodeInputs,
    Integers,
    PackedInputs,
)
from dms_train.inference.models.batch import TokenBatch
from dms_train.inference.models.decoder import Decoder
from dms_train.inference.models.fused import FusedDecoder, suits
from dms_train.kernels import dispatch

_AHEAD = 2  # groups whose numbers may be on their way between host and device


class GroupStatus(NamedTuple):
    """What the host learns after a group of steps.

    Attributes:
        tokens: [k, b], the sampled ones.
        lists: int32 [any, k, layers, rows, KV heads], for `CapturableCache.counts`.
        left: Free pages at the end.
        fault: `FreePages.fault`.
    """

    tokens: Integers
    lists: Tensor
    left: int
    fault: int


class LaunchedGroup:
    """A group of steps on its way.

    Args:
        status: int32 [k, ...], which its last kernels write.
        sequences: Of each step.
        shape: Of `GroupStatus.lists` for one step.
        reserved: `DevicePool.reserved` when it was launched.
    """

    def __init__(
        self,
        status: devices.Fetched,
        sequences: int,
        shape: tuple[int, int, int, int],
        reserved: int,
    ) -> None:
        self._status, self._sequences, self._shape = status, sequences, shape
        self.reserved = reserved

    def wait(self) -> GroupStatus:
        """The host waits until the steps are done."""
        behind, status = 2 + math.prod(self._shape), self._status.wait().numpy()
        lists = status[:, 2:behind].reshape(-1, *self._shape).copy()
        tokens = status[:, behind:].copy().view(np.int64)[:, : self._sequences]
        left, fault = status[-1, :2].tolist()
        return GroupStatus(tokens, torch.from_numpy(lists).movedim(1, 0), left, fault)


class _Captured(NamedTuple):
    """A graph with the memory it reads and writes.

    Attributes:
        replay: Runs the steps.
        sent: int64 [k, 5 or with limits 8, b] on the host, the fields of `DecodeInputs`.
        inputs: The same on the device.
        received: int32 [k, ...] on the host, what `GroupStatus` is made of.
        steps: What was captured; it holds the rest of the memory.
    """

    replay: Callable[[], None]
    sent: Tensor
    inputs: Tensor
    received: Tensor
    steps: Callable[[], None]


class DecodeGraphs:
    """The graphs of one decoder and cache.

    Args:
        decoder: Where Triton runs.
        cache: Its cache.
        most: Largest batch.
        longest: Most tokens of a sequence.
        steps: Of a group; groups of one step are captured as well.
    """

    def __init__(
        self, decoder: Decoder, cache: CapturableCache, most: int, longest: int, steps: int = 1
    ) -> None:
        self._cache = cache
        self._last = torch.zeros(most, dtype=torch.int64, device=cache.device)
        self._kernels = dispatch.triton_kernels()
        self._turn = 0
        sizes = [1 << power for power in range(_power(most) + 1)]
        self._memory = self._kernels.sample_workspace(max(sizes), cache.device)
        # what a graph reads and writes must be kept as long as the graph
        self._layers, self._fused = _Layers(decoder, cache), FusedDecoder(decoder, cache, longest)
        self._decoder = decoder
        self._recorder, self._copies = None, None
        if cache.device.type == "cuda":
            self._recorder = _Recorder(cache.device)
            self._copies = torch.cuda.Stream(cache.device)
        with torch.no_grad(), cache.recording():
            self._graphs = {
                (size, count, limited): [
                    self._capture(size, count, limited=limited) for _ in range(_AHEAD)
                ]
                for size in reversed(sizes)
                for count in {1, steps}
                for limited in (False, True)
            }

    def launch(self, inputs: PackedInputs) -> LaunchedGroup:
        """Run a group of steps, each of one token of every sequence; the host does not wait.

        At most two groups may be on their way.

        Args:
            inputs: Of k steps; k is 1 or the `steps` of this object.
        """
        k, _, b = inputs.fields.shape
        self._cache.prepare(b * self._cache.pages_of_steps(k))
        self._turn = (self._turn + 1) % _AHEAD
        captured = self._graphs[1 << _power(b), k, inputs.limited][self._turn]
        sent, received = captured.sent.numpy(), captured.received
        sent[:, ROWS] = -1
        sent[:, :, :b] = inputs.fields
        self._copy(captured)
        captured.replay()
        status = devices.Fetched(received)
        reserved = self._cache.reserved_pages
        shape = (len(self._cache.status()) - 2, *self._cache.lists_shape)
        return LaunchedGroup(status, b, shape, reserved)

    def sample(self, logits: Tensor, inputs: PackedInputs) -> Tensor:
        """Draw a token of every sequence behind a forward pass; the host does not wait.

        The next step finds the tokens where it finds those of the step before.

        Args:
            logits: [b, vocab] on the device.
            inputs: Of one step.

        Returns:
            int64 [b] on the device.
        """
        fields = DecodeInputs.of(devices.sent(inputs.fields[0], logits.device))
        tokens = torch.empty_like(fields.rows)
        self._kernels.sample(
            logits.to(self._decoder.lm_head.weight.dtype),  # as the steps have them
            fields.temperature,
            fields.keys,
            fields.rows,
            tokens=tokens,
            last=self._last,
            memory=self._memory,
            limits=fields.limits,
        )
        return tokens

    def _capture(self, size: int, count: int, *, limited: bool) -> _Captured:
        """Record `count` steps of `size` sequences."""
        device = self._cache.device
        fields = LIMITED_FIELDS if limited else FIELDS
        sent = torch.zeros(count, fields, size, dtype=torch.int64)
        sent[:, ROWS] = -1
        inputs, tokens = sent.to(device), torch.zeros(size, dtype=torch.int64, device=device)
        layers = self._fused if suits(self._decoder, size) else self._layers
        parts = [*self._cache.status(), tokens.view(torch.int32)]
        received = torch.zeros(count, sum(map(len, parts)), dtype=torch.int32)
        if device.type == "cuda":
            sent, received = sent.pin_memory(), received.pin_memory()

        # the steps are kept by this object and must not keep it in turn: its memory would stay
        kernels, last, memory = self._kernels, self._last, self._memory

        def steps() -> None:
            for number in range(count):
                fields = DecodeInputs.of(inputs[number])
                kernels.sample(
                    layers.logits(fields, last),
                    fields.temperature,
                    fields.keys,
                    fields.rows,
                    tokens=tokens,
                    last=last,
                    memory=memory,
                    limits=fields.limits,
                )
                kernels.report_status(parts, received[number])

        replay = steps if self._recorder is None else self._recorder.graph(steps)
        return _Captured(replay, sent, inputs, received, steps)

    def _copy(self, captured: _Captured) -> None:
        """Send the inputs of steps while the GPU still computes the steps before."""
        if self._copies is None:
            captured.inputs.copy_(captured.sent)
            return
        with torch.cuda.stream(self._copies):
            captured.inputs.copy_(captured.sent, non_blocking=True)
        torch.cuda.current_stream(captured.inputs.device).wait_stream(self._copies)


class _Layers:
    """Decode steps by the decoder's own layers, where those of `fused` do not suit."""

    def __init__(self, decoder: Decoder, cache: CapturableCache) -> None:
        self._decoder, self._cache = decoder, cache

    def logits(self, inputs: DecodeInputs, last: Tensor) -> Tensor:
        """As `FusedDecoder.logits`."""
        newest = last[inputs.rows.clamp(min=0)]
        tokens = torch.where(inputs.tokens < 0, newest, inputs.tokens)
        batch = TokenBatch.rectangular(tokens[:, None], inputs.position[:, None], inputs.rows)
        hidden, _ = self._decoder(batch, self._cache)
        return self._decoder.logits(hidden)


class _Recorder:
    """Captures steps as graphs whose intermediate results lie in the same memory.

    Graphs are replayed one after the other, and a replay reads nothing that another one has
    computed there. torch gives memory of a pool to captures on one stream only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def graph(self, steps: Callable[[], None]) -> Callable[[], None]:
        """Capture steps, after a warm-up that compiles their kernels; returns what replays them."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            steps()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
            steps()
        return graph.replay


def _power(size: int) -> int:
    """Of the smallest power of two that is not below `size`."""
    return (size - 1).bit_length()
