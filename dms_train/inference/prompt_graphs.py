"""Chunks of prompts replayed as CUDA graphs, so that the GPU does not wait for the host.

A chunk takes some hundred small kernels, which the host launches more slowly than the GPU runs
them. A graph holds a chunk of one sequence, padded to one of a few sizes. It is captured when a
chunk of its size and kind comes for the second time; the first time its kernels are launched, and
compiled. Where there is no GPU, the same padded chunks run without graphs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.inference.cache.paged import PagedKVCache
from dms_train.inference.devices import sent
from dms_train.inference.models.batch import Group, TokenBatch
from dms_train.inference.models.decoder import Decoder

_SMALLEST = 16  # tokens of a graph
_MOST = 24  # prompts; launching the kernels of one pass of all takes less time than more replays


class _Kind(NamedTuple):
    """What a graph computes.

    Attributes:
        size: Tokens, padding included.
        whole: Whether there is no padding.
        begins: Whether the cache holds nothing of the prompt.
        copies: Whether pages that others hold too are copied before they change.
    """

    size: int
    whole: bool
    begins: bool
    copies: bool


class PromptGraphs:
    """The graphs of one decoder and cache.

    Args:
        decoder: Where Triton runs.
        cache: Its cache.
        chunk: Most tokens of a chunk.
    """

    def __init__(self, decoder: Decoder, cache: PagedKVCache, chunk: int) -> None:
        self._decoder, self._cache = decoder, cache
        device = self._device = cache.pool.device
        self._sizes = chunk_sizes(chunk)
        layers, _, heads = cache.lists_shape
        # row, first position, number of tokens, and the tokens
        self._inputs = torch.zeros(3 + chunk, dtype=torch.int64, device=device)
        channels = decoder.architecture.hidden_size
        weight = decoder.embed_tokens.weight
        self._hidden = torch.zeros(chunk, channels, dtype=weight.dtype, device=device)
        self._reads = torch.zeros(layers, 1, heads, dtype=torch.int64, device=device)
        self._graphs: dict[_Kind, torch.cuda.CUDAGraph] = {}
        self._launched: set[_Kind] = set()
        if device.type == "cuda":
            self._memory, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def takes(self, parts: list[tuple[int, int, list[int]]]) -> bool:
        """Whether `step` computes these chunks, and not slower than all of them in one pass."""
        return len(parts) <= _MOST and all(len(tokens) > 1 for _, _, tokens in parts)

    def step(self, parts: list[tuple[int, int, list[int]]]) -> tuple[Tensor, Tensor]:
        """As the decoder's `forward`, for chunks one after the other.

        Args:
            parts: Of each chunk, its cache row, the position of its first token, and its tokens.

        Returns:
            Hidden states [t, c] and slots read, int64 [layers, chunks, kv_heads]. Those of a single
            chunk are overwritten by the next call.
        """
        found = []
        with self._cache.reserved([(row, len(tokens)) for row, _, tokens in parts]):
            for row, first, tokens in parts:
                self._chunk(row, first, tokens)
                result = self._hidden[: len(tokens)], self._reads
                found.append(result if len(parts) == 1 else tuple(x.clone() for x in result))
        hidden, reads = zip(*found, strict=True)
        return (
            (hidden[0], reads[0]) if len(parts) == 1 else (torch.cat(hidden), torch.cat(reads, 1))
        )

    def _chunk(self, row: int, first: int, tokens: list[int]) -> None:
        """Leave the results of a chunk in the memory for them."""
        count = len(tokens)
        size = next(size for size in self._sizes if size >= count)
        kind = _Kind(
            size=size,
            whole=count == size,
            begins=first == 0,
            copies=self._cache.pool.sharing and first > 0,
        )
        padding = [0] * (size - count)
        self._inputs[: 3 + size] = sent([row, first, count, *tokens, *padding], self._device)
        if self._device.type != "cuda":
            self._run(kind)
        elif kind not in self._launched:
            self._launch(kind)
        else:
            if kind not in self._graphs:
                self._graphs[kind] = self._capture(kind)
            self._graphs[kind].replay()

    def _run(self, kind: _Kind) -> None:
        """Compute the chunk of `_inputs`."""
        size = kind.size
        row, first, count = self._inputs[:3].split(1)
        tokens, place = self._inputs[3 : 3 + size], torch.arange(size, device=self._device)
        position = first + place
        if not kind.whole:
            position = torch.where(place < count, position, -1)
        lengths = None if kind.whole else (size,)
        group = Group(row, position[None], slice(0, size), lengths=lengths, begins=kind.begins)
        hidden, reads = self._decoder(TokenBatch(tokens, position, [group]), self._cache)
        self._hidden[:size] = hidden
        self._reads.copy_(reads)

    def _launch(self, kind: _Kind) -> None:
        """Run a chunk where its graph will be captured, which wants its kernels compiled."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._run(kind)
        current.wait_stream(self._stream)
        self._launched.add(kind)

    def _capture(self, kind: _Kind) -> torch.cuda.CUDAGraph:
        """Record a chunk, which computes nothing."""
        graph = torch.cuda.CUDAGraph()
        # other threads of a server may use the GPU meanwhile
        where = torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        )
        with self._cache.recording(), where:
            self._run(kind)
        return graph


def chunk_sizes(chunk: int) -> list[int]:
    """Tokens that chunks are padded to, ascending: 16, 24, 32, 48, 64, ... and `chunk`."""
    found, size = [], _SMALLEST
    while size < chunk:
        found += [size, size * 3 // 2]
        size *= 2
    return [*(size for size in found if size < chunk), chunk]
