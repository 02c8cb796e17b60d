"""Chunks of prompts replayed as CUDA graphs, so that the GPU does not wait for the host.

A chunk takes some hundred small kernels, which the host launches more slowly than the GPU runs
them. A graph holds the chunks of 1, 4 or 16 sequences, padded to one of a few sizes. The first
chunks of a size and kind launch and compile their kernels. The second ones are captured. Without a
GPU, the same padded chunks run without graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dms_train.inference.cache.interface import CapturableCache
from dms_train.inference.devices import sent
from dms_train.inference.models.batch import MicroBatch, TokenBatch
from dms_train.inference.models.decoder import Decoder

_SMALLEST = 16  # least tokens of a padded chunk
_SEQUENCES = (16, 4, 1)  # numbers of sequences of a graph
_SHORT = 128  # most tokens of a chunk that shares a graph; longer ones fill the GPU alone
_TOKENS = 1024  # most tokens of a graph of several chunks
_MOST = 24  # replays of a step; with more, launching one pass over all chunks is faster

Part: TypeAlias = tuple[int, int, list[int]]  # row, position of the first token, tokens
Batch: TypeAlias = tuple[int, list[int]]  # tokens of a padded chunk, indices of its chunks


class _Kind(NamedTuple):
    """Key of a graph.

    Attributes:
        sequences: Number of sequences.
        size: Tokens of each sequence, padding included.
        whole: True if there is no padding.
        begins: True if the cache is empty for these prompts.
        copies: True if shared pages are copied before they change.
    """

    sequences: int
    size: int
    whole: bool
    begins: bool
    copies: bool


class PromptGraphs:
    """Captured chunks of prompts for one decoder and cache.

    Args:
        decoder: A decoder on a device where Triton runs.
        cache: Its cache.
        chunk: Most tokens of a chunk.
    """

    def __init__(self, decoder: Decoder, cache: CapturableCache, chunk: int) -> None:
        self._decoder, self._cache = decoder, cache
        device = self._device = cache.device
        self._sizes = chunk_sizes(chunk)
        layers, _, heads = cache.lists_shape
        most = self._most = max(chunk, _TOKENS)
        # rows, first positions and numbers of tokens, and the tokens
        self._inputs = torch.zeros(3 * _SEQUENCES[0] + most, dtype=torch.int64, device=device)
        channels = decoder.architecture.hidden_size
        weight = decoder.embed_tokens.weight
        self._hidden = torch.zeros(most, channels, dtype=weight.dtype, device=device)
        reads = torch.zeros(layers, _SEQUENCES[0], heads, dtype=torch.int64, device=device)
        self._reads = reads
        self._graphs: dict[_Kind, torch.cuda.CUDAGraph] = {}
        self._launched: set[_Kind] = set()
        if device.type == "cuda":
            self._memory, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def batches(self, parts: list[Part]) -> list[Batch] | None:
        """Divide chunks into batches for graphs; None if one pass without graphs is faster.

        Args:
            parts: Cache row, position of the first token, and tokens of each chunk.
        """
        if any(len(tokens) == 1 for _, _, tokens in parts):
            return None
        alike: dict[tuple[int, bool], list[int]] = {}
        for number, (_, first, tokens) in enumerate(parts):
            size = next(size for size in self._sizes if size >= len(tokens))
            alike.setdefault((size, first == 0), []).append(number)
        batches = [
            (size, numbers)
            for (size, _), chunks in alike.items()
            for numbers in _split(chunks, self._most // size if size <= _SHORT else 1)
        ]
        return batches if len(batches) <= _MOST else None

    def step(self, parts: list[Part], batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """Run chunks one after the other; see `Decoder.forward`.

        Args:
            parts: As given to `batches`.
            batches: Result of `batches`.

        Returns:
            Hidden states [t, c] and slots read, int64 [layers, chunks, kv_heads]. The next call
            overwrites the results of a single chunk.
        """
        with self._cache.reserved([(row, len(tokens)) for row, _, tokens in parts]):
            if len(parts) == 1:
                self._replay(parts, batches[0][0])
                return self._hidden[: len(parts[0][2])], self._reads[:, :1]
            return self._in_order(parts, batches)

    def _in_order(self, parts: list[Part], batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """Return the results of several chunks in their order."""
        hidden, reads, begin = [], [], 0
        token_ranges: list[range] = [range(0)] * len(parts)  # in `hidden`
        order: list[int] = []
        for size, numbers in batches:
            self._replay([parts[number] for number in numbers], size)
            hidden.append(self._hidden[: len(numbers) * size].clone())
            reads.append(self._reads[:, : len(numbers)].clone())
            for number in numbers:
                token_ranges[number] = range(begin, begin + len(parts[number][2]))
                begin += size
            order += numbers
        index = sent(np.concatenate([np.array(tokens) for tokens in token_ranges]), self._device)
        back = sent(np.argsort(order), self._device)
        return torch.cat(hidden)[index], torch.cat(reads, 1)[:, back]

    def _replay(self, parts: list[Part], size: int) -> None:
        """Run or replay a batch of chunks; write the results to `_hidden` and `_reads`."""
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
        """Compute the chunks in `_inputs`."""
        b, size = kind.sequences, kind.size
        rows, first, count = self._inputs[: 3 * b].view(3, b)
        tokens, offset = self._inputs[3 * b :][: b * size], torch.arange(size, device=self._device)
        position = first[:, None] + offset
        if not kind.whole:
            position = torch.where(offset < count[:, None], position, -1)
        lengths = None if kind.whole else (size,) * b
        micro_batch = MicroBatch(
            rows, position, slice(0, b * size), lengths=lengths, begins=kind.begins
        )
        hidden, reads = self._decoder(
            TokenBatch(tokens, position.flatten(), [micro_batch]), self._cache
        )
        self._hidden[: b * size] = hidden
        self._reads[:, :b] = reads

    def _launch(self, kind: _Kind) -> None:
        """Run a chunk on the capture stream, to compile its kernels before the capture."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._run(kind)
        current.wait_stream(self._stream)
        self._launched.add(kind)

    def _capture(self, kind: _Kind) -> torch.cuda.CUDAGraph:
        """Capture a chunk without computing it."""
        graph = torch.cuda.CUDAGraph()
        # other threads of a server may use the GPU meanwhile
        where = torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        )
        with self._cache.recording(), where:
            self._run(kind)
        return graph


def _split(numbers: list[int], most: int) -> Iterator[list[int]]:
    """Split into lists with lengths that are in `_SEQUENCES` and at most `most`."""
    begin = 0
    while begin < len(numbers):
        left = min(most, len(numbers) - begin)
        count = next(count for count in _SEQUENCES if count <= left)
        yield numbers[begin : begin + count]
        begin += count


def chunk_sizes(chunk: int) -> list[int]:
    """Return the padded sizes of chunks, ascending: 16, 32, 64, 128, 192, 256, ... and `chunk`.

    Short chunks have few sizes, so that those of a step share graphs. Reading the weights takes
    most of their time, so that padding costs little.
    """
    sizes, size = [], _SMALLEST
    while size < chunk:
        sizes += [size] if size < _SHORT else [size, size * 3 // 2]
        size *= 2
    return [*(size for size in sizes if size < chunk), chunk]
