"""Decode steps replayed as CUDA graphs: one launch instead of several hundred.

A graph is captured for a batch size, a power of two; unused batch entries hold row -1, which the
kernels skip. The host adds pages and widens tables before the replay; if that moves memory, the
graphs are captured again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.models.decoder import Decoder


class _Captured(NamedTuple):
    """A graph with the memory it reads and writes."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    position: Tensor
    rows: Tensor
    hidden: Tensor
    reads: Tensor


class DecodeGraphs:
    """The graphs of one decoder and cache.

    Args:
        decoder: On a GPU.
        cache: Its cache.
    """

    def __init__(self, decoder: Decoder, cache: PagedKVCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._graphs: dict[int, _Captured] = {}  # by batch size
        self._memory = cache.addresses

    def step(self, tokens: Tensor, position: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """As the decoder's `forward` for one token per sequence: tokens and position [b, 1].

        The results are overwritten by the next step.
        """
        b = len(rows)
        size = 1 << (b - 1).bit_length()
        self._cache.prepare(b)
        if self._cache.addresses != self._memory:
            self._graphs.clear()
            self._memory = self._cache.addresses
        if size not in self._graphs:
            self._graphs[size] = self._capture(size, rows.device)
        captured = self._graphs[size]
        captured.rows.fill_(-1)
        for buffer, value in zip(captured[1:4], (tokens, position, rows), strict=True):
            buffer[:b].copy_(value)
        captured.graph.replay()
        return captured.hidden[:b], captured.reads[:, :b]

    def _capture(self, size: int, device: torch.device) -> _Captured:
        """Record a step of `size` sequences, after a warm-up that compiles its kernels."""
        tokens, position = torch.zeros(2, size, 1, dtype=torch.int64, device=device)
        rows = torch.full((size,), -1, device=device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._decoder(tokens, position, rows, self._cache)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden, reads = self._decoder(tokens, position, rows, self._cache)
        return _Captured(graph, tokens, position, rows, hidden, reads)
