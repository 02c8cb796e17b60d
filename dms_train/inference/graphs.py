"""Decode steps replayed as CUDA graphs: one launch instead of several hundred.

A graph is captured at the start for every batch size that is a power of two; unused batch entries
hold row -1, which the kernels skip. The cache never moves, so that the graphs stay valid.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.models.batch import TokenBatch
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
        most: Largest batch.
    """

    def __init__(self, decoder: Decoder, cache: PagedKVCache, most: int) -> None:
        self._decoder, self._cache = decoder, cache
        sizes = [1 << power for power in range(_power(most) + 1)]
        with torch.no_grad(), cache.recording():
            self._graphs = {size: self._capture(size) for size in reversed(sizes)}

    def step(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """As the decoder's `forward` for one token of every sequence.

        The results are overwritten by the next step.
        """
        b = len(batch.tokens)
        self._cache.prepare(b)
        captured = self._graphs[1 << _power(b)]
        captured.rows.fill_(-1)
        values = (batch.tokens, batch.position, batch.groups[0].rows)
        for buffer, value in zip(captured[1:4], values, strict=True):
            buffer[:b].copy_(value)
        captured.graph.replay()
        return captured.hidden[:b], captured.reads[:, :b]

    def _capture(self, size: int) -> _Captured:
        """Record a step of `size` sequences, after a warm-up that compiles its kernels."""
        device = self._cache.pool.device
        tokens, position = torch.zeros(2, size, dtype=torch.int64, device=device)
        rows = torch.full((size,), -1, device=device)
        batch = TokenBatch.rectangular(tokens[:, None], position[:, None], rows)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._decoder(batch, self._cache)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden, reads = self._decoder(batch, self._cache)
        return _Captured(graph, tokens, position, rows, hidden, reads)


def _power(size: int) -> int:
    """Of the smallest power of two that is not below `size`."""
    return (size - 1).bit_length()
