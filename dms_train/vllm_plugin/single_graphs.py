"""Attention of requests that decode beside a part of a prompt, replayed as CUDA graphs.

vLLM replays a decode step as one graph, but launches every kernel of a step with a part of a
prompt. A graph of this module holds the requests with one token in one layer, padded to a power of
two. Without a GPU, the same padded requests run without graphs.

Shape letters: b requests with one token, h query heads, g KV heads, d head size.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.kernels.decode.types import Step
from dms_train.vllm_plugin.cache import GrantedCache
from dms_train.vllm_plugin.captures import capture

MOST = 2048  # most requests of a graph; more keep the GPU busy


class _Kind(NamedTuple):
    """Key of a graph.

    Attributes:
        layer: Layer number.
        size: Requests, padding included.
    """

    layer: int
    size: int


class SingleGraphs:
    """Captured tokens of requests that decode, for one cache.

    Args:
        cache: The cache.
        angles: For each layer, [any, 2, d]: cosines and sines of the tokens of a step, in memory
            that never moves.
        heads: Query heads.
        dtype: Type of the tokens.
        requests: Most requests of a batch; more than `MOST` are never replayed.
    """

    def __init__(
        self,
        cache: GrantedCache,
        angles: list[Tensor],
        *,
        heads: int,
        dtype: torch.dtype,
        requests: int,
    ) -> None:
        self._cache, self._angles = cache, angles
        most = min(requests, MOST)
        self._sizes = [*(1 << k for k in range((most - 1).bit_length())), most]
        groups, size, device = cache.lists_shape[2], angles[0].shape[-1], cache.device
        # the memory that graphs read; it never moves
        self._query = torch.zeros(most, heads, size, dtype=dtype, device=device)
        self._key, self._value = self._query.new_zeros(2, most, groups, size)
        self._position = torch.zeros(most, dtype=torch.int64, device=device)
        self._rows = torch.full_like(self._position, -1)
        self._output = torch.zeros_like(self._query)
        self._graphs: dict[_Kind, torch.cuda.CUDAGraph] = {}

    def capture(self) -> None:
        """Capture all graphs anew, for the memory that the cache has now."""
        kinds = [_Kind(*pair) for pair in product(range(len(self._angles)), self._sizes)]
        self._graphs = capture(kinds, self._run, torch.cuda.Stream(self._cache.device))

    def can_run(self, requests: int) -> bool:
        """Return whether a batch with so many requests with one token has graphs."""
        captured = self._graphs or self._cache.device.type != "cuda"
        return bool(captured) and 0 < requests <= self._sizes[-1]

    def begin(self, position: Tensor, rows: Tensor) -> None:
        """Set the requests of a step, before its first layer.

        Args:
            position: Integers [b].
            rows: int64 [b], rows of the cache.
        """
        count = len(rows)
        self._position[:count] = position
        self._rows[:count] = rows
        self._rows[count:] = -1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Store the tokens of a layer and write their attention.

        Args:
            layer: Layer number; layers are visited in order.
            query: [b, h, d] without RoPE; b as in `begin`.
            key: [b, g, d] without RoPE.
            value: [b, g, d].
            output: [b, h, d]; written.
        """
        count = len(query)
        kind = _Kind(layer, next(size for size in self._sizes if size >= count))
        self._query[:count] = query
        self._key[:count] = key
        self._value[:count] = value
        if self._graphs:
            self._graphs[kind].replay()
        else:
            self._run(kind)
        output.copy_(self._output[:count])

    def _run(self, kind: _Kind) -> None:
        """Compute the tokens in memory."""
        first, angles = slice(kind.size), self._angles[kind.layer]
        step = Step(
            query=self._query[first],
            key=self._key[first],
            value=self._value[first],
            cos=angles[first, 0],
            sin=angles[first, 1],
            position=self._position[first],
            rows=self._rows[first],
        )
        self._cache.attend(kind.layer, step, self._output[first])
