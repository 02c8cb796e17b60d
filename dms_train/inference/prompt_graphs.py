"""Chunks of prompts replayed as CUDA graphs, so that the GPU does not wait for the host.

A chunk takes some hundred small kernels, which the host launches more slowly than the GPU runs
them. A graph holds the chunks of 1, 4 or 16 sequences, padded to one of a few sizes. It is captured
when chunks of its size and kind come for the second time; the first time its kernels are launched,
and compiled. Where there is no GPU, the same padded chunks run without graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dms_train.inference.cache.interface import CapturableCache
from dms_train.inference.devices import sent
from dms_train.inference.models.batch import Group, TokenBatch
from dms_train.inference.models.decoder import Decoder

_SMALLEST = 16  # tokens of a graph
_SEQUENCES = (16, 4, 1)  # of a graph
_SHORT = 128  # tokens of a chunk that shares a graph; longer ones occupy the GPU alone
_MOST = 24  # replays; launching the kernels of one pass of all takes less time than more of them

Part: TypeAlias = tuple[int, int, list[int]]  # row, position of the first token, tokens
Batch: TypeAlias = tuple[int, list[int]]  # tokens of a chunk with its padding, places of chunks


class _Kind(NamedTuple):
    """What a graph computes.

    Attributes:
        sequences: How many.
        size: Tokens of each, padding included.
        whole: Whether there is no padding.
        begins: Whether the cache holds nothing of the prompts.
        copies: Whether pages that others hold too are copied before they change.
    """

    sequences: int
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

    def __init__(self, decoder: Decoder, cache: CapturableCache, chunk: int) -> None:
        self._decoder, self._cache = decoder, cache
        device = self._device = cache.device
        self._sizes = chunk_sizes(chunk)
        layers, _, heads = cache.lists_shape
        # rows, first positions and numbers of tokens, and the tokens
        self._inputs = torch.zeros(3 * _SEQUENCES[0] + chunk, dtype=torch.int64, device=device)
        channels = decoder.architecture.hidden_size
        weight = decoder.embed_tokens.weight
        self._hidden = torch.zeros(chunk, channels, dtype=weight.dtype, device=device)
        reads = torch.zeros(layers, _SEQUENCES[0], heads, dtype=torch.int64, device=device)
        self._reads = reads
        self._graphs: dict[_Kind, torch.cuda.CUDAGraph] = {}
        self._launched: set[_Kind] = set()
        if device.type == "cuda":
            self._memory, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def batches(self, parts: list[Part]) -> list[Batch] | None:
        """Which chunks share a graph; None if one pass without graphs takes less time.

        Args:
            parts: Of each chunk, its cache row, the position of its first token, and its tokens.
        """
        if any(len(tokens) == 1 for _, _, tokens in parts):
            return None
        alike: dict[tuple[int, bool], list[int]] = {}
        for number, (_, first, tokens) in enumerate(parts):
            size = next(size for size in self._sizes if size >= len(tokens))
            alike.setdefault((size, first == 0), []).append(number)
        found = [
            (size, numbers)
            for (size, _), places in alike.items()
            for numbers in _divided(places, self._sizes[-1] // size if size <= _SHORT else 1)
        ]
        return found if len(found) <= _MOST else None

    def step(self, parts: list[Part], batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """As the decoder's `forward`, for chunks one after the other.

        Args:
            parts: As given to `batches`.
            batches: What it has returned.

        Returns:
            Hidden states [t, c] and slots read, int64 [layers, chunks, kv_heads]. Those of a single
            chunk are overwritten by the next call.
        """
        with self._cache.reserved([(row, len(tokens)) for row, _, tokens in parts]):
            if len(parts) == 1:
                self._replay(parts, batches[0][0])
                return self._hidden[: len(parts[0][2])], self._reads[:, :1]
            return self._in_order(parts, batches)

    def _in_order(self, parts: list[Part], batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """Results of several chunks in their order."""
        hidden, reads, begin = [], [], 0
        places: list[range] = [range(0)] * len(parts)  # of their tokens in `hidden`
        order: list[int] = []
        for size, numbers in batches:
            self._replay([parts[number] for number in numbers], size)
            hidden.append(self._hidden[: len(numbers) * size].clone())
            reads.append(self._reads[:, : len(numbers)].clone())
            for number in numbers:
                places[number] = range(begin, begin + len(parts[number][2]))
                begin += size
            order += numbers
        index = sent(np.concatenate([np.array(place) for place in places]), self._device)
        back = sent(np.argsort(order), self._device)
        return torch.cat(hidden)[index], torch.cat(reads, 1)[:, back]

    def _replay(self, parts: list[Part], size: int) -> None:
        """Leave the results of chunks in the memory for them."""
        rows, first, tokens = zip(*parts, strict=True)
        counts = [len(part) for part in tokens]
        begins = first[0] == 0
        kind = _Kind(
            sequences=len(parts),
            size=size,
            whole=min(counts) == size,
            begins=begins,
            copies=self._cache.shares_pages and not begins,
        )
        padded = [token for part in tokens for token in [*part, *[0] * (size - len(part))]]
        given = [*rows, *first, *counts, *padded]
        self._inputs[: len(given)] = sent(given, self._device)
        if self._device.type != "cuda":
            self._run(kind)
        elif kind not in self._launched:
            self._launch(kind)
        else:
            if kind not in self._graphs:
                self._graphs[kind] = self._capture(kind)
            self._graphs[kind].replay()

    def _run(self, kind: _Kind) -> None:
        """Compute the chunks of `_inputs`."""
        b, size = kind.sequences, kind.size
        rows, first, count = self._inputs[: 3 * b].view(3, b)
        tokens, place = self._inputs[3 * b :][: b * size], torch.arange(size, device=self._device)
        position = first[:, None] + place
        if not kind.whole:
            position = torch.where(place < count[:, None], position, -1)
        lengths = None if kind.whole else (size,) * b
        group = Group(rows, position, slice(0, b * size), lengths=lengths, begins=kind.begins)
        hidden, reads = self._decoder(TokenBatch(tokens, position.flatten(), [group]), self._cache)
        self._hidden[: b * size] = hidden
        self._reads[:, :b] = reads

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


def _divided(numbers: list[int], most: int) -> Iterator[list[int]]:
    """In lists of `_SEQUENCES`, and of no more than `most`."""
    begin = 0
    while begin < len(numbers):
        left = min(most, len(numbers) - begin)
        count = next(count for count in _SEQUENCES if count <= left)
        yield numbers[begin : begin + count]
        begin += count


def chunk_sizes(chunk: int) -> list[int]:
    """Tokens that chunks are padded to, ascending: 16, 24, 32, 48, 64, ... and `chunk`."""
    found, size = [], _SMALLEST
    while size < chunk:
        found += [size, size * 3 // 2]
        size *= 2
    return [*(size for size in found if size < chunk), chunk]
