"""Full chunks of a prompt replayed as CUDA graphs, so that the GPU does not wait for the host.

A chunk takes some hundred small kernels, which the host launches more slowly than the GPU of a
small model runs them. A graph is captured for the first chunk of a prompt and for a later one, with
as many tokens as a chunk may have; shorter chunks run without a graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.devices import sent
from dms_train.inference.models.batch import Group, TokenBatch
from dms_train.inference.models.decoder import Decoder


class _Captured(NamedTuple):
    """A graph with its results, which the next replay of either graph overwrites.

    Attributes:
        graph: A chunk.
        hidden: [chunk, c].
        reads: int64 [layers, 1, kv_heads].
    """

    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    reads: Tensor


class PromptGraphs:
    """The graphs of one decoder and cache, which is empty.

    Args:
        decoder: On a GPU.
        cache: Its cache.
        chunk: Tokens of a chunk.
        longest: Most tokens of a sequence.

    Attributes:
        chunk: As given.
    """

    def __init__(self, decoder: Decoder, cache: PagedKVCache, chunk: int, longest: int) -> None:
        self._decoder, self._cache, self.chunk = decoder, cache, chunk
        device = cache.pool.device
        self._tokens = torch.zeros(chunk, dtype=torch.int64, device=device)
        self._first, self._row = torch.zeros(2, 1, dtype=torch.int64, device=device)
        self._memory, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        kinds = [begins for begins in (True, False) if self._fits(chunk * (2 - begins), longest)]
        self._graphs = {begins: self._capture(begins=begins) for begins in kinds}
        cache.free(self._row)

    def takes(self, first: int, count: int) -> bool:
        """Whether there is a graph for a chunk: its first position and number of tokens."""
        begins = first == 0
        copies = self._cache.pool.sharing and not begins  # of shared pages; the host counts them
        return count == self.chunk and begins in self._graphs and not copies

    def step(self, row: int, first: int, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """As the decoder's `forward` for a chunk of one sequence."""
        self._cache.prepare(1, self.chunk)
        self._tokens.copy_(sent(tokens, self._tokens.device))
        self._first.fill_(first)
        self._row.fill_(row)
        captured = self._graphs[first == 0]
        captured.graph.replay()
        return captured.hidden, captured.reads

    def _fits(self, tokens: int, longest: int) -> bool:
        """Whether a sequence may have so many tokens, none of them evicted."""
        layers, _, heads = self._cache.lists_shape
        pages = layers * heads * -(-tokens // self._cache.pool.page_slots)
        return tokens <= longest and pages <= self._cache.max_pages

    def _run(self, *, begins: bool) -> tuple[Tensor, Tensor]:
        position = self._first + torch.arange(self.chunk, device=self._first.device)
        group = Group(self._row, position[None], slice(0, self.chunk), begins=begins)
        return self._decoder(TokenBatch(self._tokens, position, [group]), self._cache)

    def _capture(self, *, begins: bool) -> _Captured:
        """Record a chunk, after a warm-up that compiles its kernels and fills row 0."""
        self._first.fill_(0 if begins else self.chunk)
        stream, current = self._stream, torch.cuda.current_stream(self._first.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self._run(begins=begins)
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with self._cache.recording(), torch.cuda.graph(graph, pool=self._memory, stream=stream):
            hidden, reads = self._run(begins=begins)
        return _Captured(graph, hidden, reads)
