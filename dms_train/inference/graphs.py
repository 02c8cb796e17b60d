"""Decode steps replayed as CUDA graphs: one launch instead of several hundred.

A graph holds whole steps: the layers, the logits and the next token of every sequence. The next
step reads the tokens without the host. There are graphs for every batch size that is a power of
two, of one step and of a burst, with and without top-k, top-p and min-p. Each is captured when it
is first launched, because a job needs few of them; a server captures all at the start. Unused
entries of a batch have row -1, which the kernels skip. The graphs stay valid, because the cache
never moves. In Triton's interpreter, on a CPU, the same steps run without graphs.

Shape letters: b sequences of a step, k steps of a burst.
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
from dms_train.inference.models.fused import FusedDecoder, can_fuse
from dms_train.kernels import dispatch

_IN_FLIGHT = 2  # bursts whose inputs or results may be in flight between host and device


class BurstStatus(NamedTuple):
    """Results of a burst of steps on the host.

    Attributes:
        tokens: [k, b], sampled tokens.
        lists: int32 [any, k, layers, rows, kv_heads], argument of `CapturableCache.counts`.
        left: Free pages at the end.
        fault: `FreePages.fault`.
    """

    tokens: Integers
    lists: Tensor
    left: int
    fault: int


class LaunchedBurst:
    """A burst of steps in flight.

    Args:
        status: int32 [k, ...], written by the last kernel of each step.
        sequences: Number of sequences of each step.
        shape: Shape of `BurstStatus.lists` for one step.
        reserved: `CapturableCache.reserved_pages` at the launch.
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

    def wait(self) -> BurstStatus:
        """Wait for the steps and return their results."""
        status = self._status.wait().numpy()
        end = 2 + math.prod(self._shape)  # end of the lists, which follow free pages and fault
        lists = status[:, 2:end].reshape(-1, *self._shape).copy()
        tokens = status[:, end:].copy().view(np.int64)[:, : self._sequences]
        left, fault = status[-1, :2].tolist()
        return BurstStatus(tokens, torch.from_numpy(lists).movedim(1, 0), left, fault)


class _Kind(NamedTuple):
    """Key of graphs.

    Attributes:
        size: Sequences, unused entries included.
        steps: Steps of the graph.
        limited: True if the steps apply top-k, top-p and min-p.
    """

    size: int
    steps: int
    limited: bool


class _Captured(NamedTuple):
    """A graph with its inputs and outputs.

    Attributes:
        replay: Runs the steps.
        sent: int64 [k, 5 or with limits 8, b] on the host, the fields of `DecodeInputs`.
        inputs: Copy of `sent` on the device.
        received: int32 [k, ...] on the host, raw data of `BurstStatus`.
        steps: The captured function, which keeps the remaining memory alive.
    """

    replay: Callable[[], None]
    sent: Tensor
    inputs: Tensor
    received: Tensor
    steps: Callable[[], None]


class DecodeGraphs:
    """Captured decode steps of one decoder and cache.

    Args:
        decoder: A decoder on a device where Triton runs.
        cache: Its cache.
        most: Largest batch.
        longest: Most tokens of a sequence.
        steps: Steps of a burst; bursts of one step are captured as well.
    """

    def __init__(
        self, decoder: Decoder, cache: CapturableCache, most: int, longest: int, steps: int = 1
    ) -> None:
        self._cache = cache
        self._last = torch.zeros(most, dtype=torch.int64, device=cache.device)
        self._kernels = dispatch.triton_kernels()
        self._turn = 0
        self._sizes, self._steps = [1 << power for power in range(_power(most) + 1)], steps
        self._memory = self._kernels.sample_workspace(max(self._sizes), cache.device)
        # kept, because a graph does not keep its memory alive
        self._layers, self._fused = _Layers(decoder, cache), FusedDecoder(decoder, cache, longest)
        self._decoder = decoder
        self._recorder, self._copies = None, None
        if cache.device.type == "cuda":
            self._recorder = _Recorder(cache.device)
            self._copies = torch.cuda.Stream(cache.device)
        self._graphs: dict[_Kind, list[_Captured]] = {}

    def capture(self) -> None:
        """Capture the graphs of all kinds, so that no later launch waits for a capture."""
        for size in reversed(self._sizes):  # smaller graphs use the memory of larger ones
            for count in sorted({1, self._steps}):
                for limited in (False, True):
                    self._graphs_of(_Kind(size, count, limited))

    def launch(self, inputs: PackedInputs) -> LaunchedBurst:
        """Launch a burst of steps of one token per sequence; the host does not wait.

        At most two bursts may be in flight.

        Args:
            inputs: Inputs of k steps; k is 1 or the `steps` of this object.
        """
        k, _, b = inputs.fields.shape
        self._cache.prepare_steps(inputs.rows[0].tolist(), k)
        self._turn = (self._turn + 1) % _IN_FLIGHT
        captured = self._graphs_of(_Kind(1 << _power(b), k, inputs.limited))[self._turn]
        sent, received = captured.sent.numpy(), captured.received
        sent[:, ROWS] = -1
        sent[:, :, :b] = inputs.fields
        self._copy(captured)
        captured.replay()
        status = devices.Fetched(received)
        reserved = self._cache.reserved_pages
        shape = (len(self._cache.status()) - 2, *self._cache.lists_shape)
        return LaunchedBurst(status, b, shape, reserved)

    def sample(self, logits: Tensor, inputs: PackedInputs) -> Tensor:
        """Sample a token of every sequence after a forward pass; the host does not wait.

        The next step reads these tokens like those of a decode step.

        Args:
            logits: [b, vocab] on the device.
            inputs: Inputs of one step.

        Returns:
            int64 [b] on the device.
        """
        fields = DecodeInputs.of(devices.sent(inputs.fields[0], logits.device))
        tokens = torch.empty_like(fields.rows)
        self._kernels.sample(
            logits.to(self._decoder.lm_head.weight.dtype),  # the dtype of captured steps
            fields.temperature,
            fields.keys,
            fields.rows,
            tokens=tokens,
            last=self._last,
            memory=self._memory,
            limits=fields.limits,
        )
        return tokens

    @torch.no_grad()
    def _graphs_of(self, kind: _Kind) -> list[_Captured]:
        """Return the graphs of a kind, which are captured on first use."""
        if kind not in self._graphs:
            with self._cache.recording():
                self._graphs[kind] = [self._capture(*kind) for _ in range(_IN_FLIGHT)]
        return self._graphs[kind]

    def _capture(self, size: int, count: int, limited: bool) -> _Captured:
        """Record `count` steps of `size` sequences."""
        device = self._cache.device
        fields = LIMITED_FIELDS if limited else FIELDS
        sent = torch.zeros(count, fields, size, dtype=torch.int64)
        sent[:, ROWS] = -1
        inputs, tokens = sent.to(device), torch.zeros(size, dtype=torch.int64, device=device)
        layers = self._fused if can_fuse(self._decoder, size) else self._layers
        status = [*self._cache.status(), tokens.view(torch.int32)]
        received = torch.zeros(count, sum(map(len, status)), dtype=torch.int32)
        if device.type == "cuda":
            sent, received = sent.pin_memory(), received.pin_memory()

        # local names: steps that referred to self would form a cycle, and its memory would stay
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
                kernels.report_status(status, received[number])

        replay = steps if self._recorder is None else self._recorder.graph(steps)
        return _Captured(replay, sent, inputs, received, steps)

    def _copy(self, captured: _Captured) -> None:
        """Send the inputs of steps while the GPU computes the previous steps."""
        if self._copies is None:
            captured.inputs.copy_(captured.sent)
            return
        with torch.cuda.stream(self._copies):
            captured.inputs.copy_(captured.sent, non_blocking=True)
        torch.cuda.current_stream(captured.inputs.device).wait_stream(self._copies)


class _Layers:
    """Decode steps by the decoder's own layers, for decoders that cannot use the fused ones."""

    def __init__(self, decoder: Decoder, cache: CapturableCache) -> None:
        self._decoder, self._cache = decoder, cache

    def logits(self, inputs: DecodeInputs, last: Tensor) -> Tensor:
        """Compute the logits of one token of every sequence; see `FusedDecoder.logits`."""
        newest = last[inputs.rows.clamp(min=0)]
        tokens = torch.where(inputs.tokens < 0, newest, inputs.tokens)
        batch = TokenBatch.rectangular(tokens[:, None], inputs.position[:, None], inputs.rows)
        hidden, _ = self._decoder(batch, self._cache)
        return self._decoder.logits(hidden)


class _Recorder:
    """Recorder of steps as graphs whose intermediate results share memory.

    Graphs are replayed one after the other, and none reads intermediate results of another. In
    torch, a memory pool serves the captures of one stream only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def graph(self, steps: Callable[[], None]) -> Callable[[], None]:
        """Capture steps after a warm-up that compiles their kernels; return the replay function."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            steps()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # other threads may use the GPU meanwhile
        where = torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        )
        with where:
            steps()
        return graph.replay


def _power(size: int) -> int:
    """Return the exponent of the smallest power of two >= `size`."""
    return (size - 1).bit_length()
