"""Decode steps replayed as CUDA graphs: one launch instead of several hundred.

A graph holds a whole step: the layers, the logits and the next token of every sequence, which the
next step can read without the host. It is captured at the start for every batch size that is a
power of two; unused places hold row -1, which the kernels skip. The cache never moves, so that the
graphs stay valid. In Triton's interpreter, on a CPU, the same steps run without graphs.

Shape letters: b sequences of a step.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.models.batch import TokenBatch
from dms_train.inference.models.decoder import Decoder
from dms_train.inference.models.fused import DecodeInputs, FusedDecoder, suits

_AHEAD = 2  # steps whose numbers may be on their way between host and device


class StepStatus(NamedTuple):
    """What the host learns after a step.

    Attributes:
        tokens: int64 [b], the sampled ones.
        lists: int32 [any, layers, rows, KV heads], for `PagedKVCache.counts`.
        left: Free pages.
        fault: `FreePages.fault`.
    """

    tokens: Tensor
    lists: Tensor
    left: int
    fault: int


class LaunchedStep:
    """A step on its way.

    Args:
        event: Recorded behind it; None on a CPU, where it is done.
        status: int32 on the host, filled by then.
        sequences: Of the step.
        shape: Of `StepStatus.lists`.
        reserved: `DevicePool.reserved` when it was launched.
    """

    def __init__(
        self,
        event: torch.cuda.Event | None,
        status: Tensor,
        sequences: int,
        shape: tuple[int, int, int, int],
        reserved: int,
    ) -> None:
        self._event, self._status = event, status
        self._sequences, self._shape = sequences, shape
        self.reserved = reserved

    def wait(self) -> StepStatus:
        """The host waits until the step is done."""
        if self._event is not None:
            self._event.synchronize()
        lists = self._status[2 : 2 + math.prod(self._shape)].clone()
        tokens = self._status[2 + len(lists) :].clone().view(torch.int64)[: self._sequences]
        left, fault = self._status[:2].tolist()
        return StepStatus(tokens, lists.view(self._shape), left, fault)


class _Captured(NamedTuple):
    """A graph with the memory it reads and writes.

    Attributes:
        replay: Runs the step.
        sent: int64 [5, b] on the host, the fields of `DecodeInputs`.
        received: int32 on the host, what `StepStatus` is made of.
        step: What was captured; it holds the rest of the memory.
    """

    replay: Callable[[], None]
    sent: Tensor
    received: Tensor
    step: Callable[[], None]


class DecodeGraphs:
    """The graphs of one decoder and cache.

    Args:
        decoder: Where Triton runs.
        cache: Its cache.
        most: Largest batch.
        longest: Most tokens of a sequence.
    """

    def __init__(self, decoder: Decoder, cache: PagedKVCache, most: int, longest: int) -> None:
        self._cache = cache
        self._last = torch.zeros(most, dtype=torch.int64, device=cache.pool.device)
        self._sampler: Any = importlib.import_module("dms_train.kernels.layers.triton_sample")
        self._turn = 0
        sizes = [1 << power for power in range(_power(most) + 1)]
        self._memory = self._sampler.Workspace.of(max(sizes), cache.pool.device)
        # what a graph reads and writes must be kept as long as the graph
        self._layers, self._fused = _Layers(decoder, cache), FusedDecoder(decoder, cache, longest)
        self._decoder = decoder
        with torch.no_grad(), cache.recording():
            self._graphs = {
                size: [self._capture(size) for _ in range(_AHEAD)] for size in reversed(sizes)
            }

    def launch(self, inputs: list[list[int]], temperature: list[float]) -> LaunchedStep:
        """Run one token of every sequence and sample the next; the host does not wait.

        At most two steps may be on their way.

        Args:
            inputs: Tokens, positions, rows and keys, as in `DecodeInputs`.
            temperature: Of each sequence.
        """
        b = len(temperature)
        self._cache.prepare(b)
        self._turn = (self._turn + 1) % _AHEAD
        captured = self._graphs[1 << _power(b)][self._turn]
        sent, received = captured.sent, captured.received
        sent[2].fill_(-1)
        sent[:4, :b] = torch.tensor(inputs)
        sent[4].view(torch.float64)[:b] = torch.tensor(temperature, dtype=torch.float64)
        captured.replay()
        event = None
        if received.is_pinned():
            event = torch.cuda.Event()
            event.record()
        reserved = self._cache.pool.reserved
        shape = (len(self._cache.status()) - 2, *self._cache.lists_shape)
        return LaunchedStep(event, received, b, shape, reserved)

    def _capture(self, size: int) -> _Captured:
        """Record a step of `size` sequences."""
        device = self._cache.pool.device
        inputs = torch.zeros(5, size, dtype=torch.int64, device=device)
        tokens = torch.zeros(size, dtype=torch.int64, device=device)
        layers = self._fused if suits(self._decoder, size) else self._layers
        parts = [*self._cache.status(), tokens.view(torch.int32)]
        status = torch.empty(sum(map(len, parts)), dtype=torch.int32, device=device)
        sent, received = [torch.zeros_like(x, device="cpu") for x in (inputs, status)]
        sent[2] = -1
        if device.type == "cuda":
            sent, received = sent.pin_memory(), received.pin_memory()

        # the step is kept by this object and must not keep it in turn: its memory would stay
        sampler, last, memory = self._sampler, self._last, self._memory

        def step() -> None:
            inputs.copy_(sent, non_blocking=True)
            tokens_in, position, rows, keys, bits = inputs.unbind()
            fields = DecodeInputs(tokens_in, position, rows, keys, bits.view(torch.float64))
            sampler.sample(
                layers.logits(fields, last),
                fields.temperature,
                fields.keys,
                fields.rows,
                tokens=tokens,
                last=last,
                memory=memory,
            )
            torch.cat(parts, out=status)
            received.copy_(status, non_blocking=True)

        replay = _graph(step, device) if device.type == "cuda" else step
        return _Captured(replay, sent, received, step)


class _Layers:
    """Decode steps by the decoder's own layers, where those of `fused` do not suit."""

    def __init__(self, decoder: Decoder, cache: PagedKVCache) -> None:
        self._decoder, self._cache = decoder, cache

    def logits(self, inputs: DecodeInputs, last: Tensor) -> Tensor:
        """As `FusedDecoder.logits`."""
        newest = last[inputs.rows.clamp(min=0)]
        tokens = torch.where(inputs.tokens < 0, newest, inputs.tokens)
        batch = TokenBatch.rectangular(tokens[:, None], inputs.position[:, None], inputs.rows)
        hidden, _ = self._decoder(batch, self._cache)
        return self._decoder.logits(hidden)


def _graph(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture a step, after a warm-up that compiles its kernels; returns what replays it."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _power(size: int) -> int:
    """Of the smallest power of two that is not below `size`."""
    return (size - 1).bit_length()
