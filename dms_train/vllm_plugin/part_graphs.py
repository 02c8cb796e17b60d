"""Attention of parts of prompts, replayed as CUDA graphs.

A part takes dozens of small kernels in each layer, which the host launches more slowly than
the GPU runs them, and all requests that decode wait for it. A graph holds one part in one layer,
padded to one of a few sizes. All graphs are captured when vLLM starts. Without a GPU, the same
padded parts run without graphs.

Shape letters: n tokens of a part, h query heads, g KV heads, d head size.
"""

from __future__ import annotations

from itertools import product, starmap
from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.inference.cache.interface import AttentionStep
from dms_train.inference.prompt_graphs import chunk_sizes
from dms_train.vllm_plugin.cache import GrantedCache
from dms_train.vllm_plugin.captures import capture

LONGEST = 2048  # most tokens of a part that is replayed; longer ones keep the GPU busy


class Part(NamedTuple):
    """Tokens of one request in one layer, without RoPE.

    Attributes:
        query: [n, h, d].
        key: [n, g, d].
        value: [n, g, d].
        position: int64 [n].
        row: int64 [1], row of the cache.
        table: `interface.rotation_table` of the tokens.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    position: Tensor
    row: Tensor
    table: Tensor


class _Kind(NamedTuple):
    """Key of a graph.

    Attributes:
        layer: Layer number.
        size: Tokens, padding included.
        begins: True if the cache is empty for this request.
    """

    layer: int
    size: int
    begins: bool


class PartGraphs:
    """Captured parts of prompts for one cache.

    Args:
        cache: The cache.
        heads: Query heads.
        size: Channels of a head.
        dtype: Type of the tokens.
        longest: Most tokens of a part; longer parts than `LONGEST` are never replayed.
    """

    def __init__(
        self, cache: GrantedCache, *, heads: int, size: int, dtype: torch.dtype, longest: int
    ) -> None:
        self._cache = cache
        layers, _, groups = cache.lists_shape
        self._longest = min(longest, LONGEST)
        self._sizes = chunk_sizes(self._longest)
        self._layers = range(layers)
        most, device = self._sizes[-1], cache.device
        tokens = torch.zeros(most, heads + 2 * groups, size, dtype=dtype, device=device)
        query, key, value = tokens.split((heads, groups, groups), 1)
        self._inputs = Part(  # the memory that graphs read; it never moves
            query=query.contiguous(),
            key=key.contiguous(),
            value=value.contiguous(),
            position=torch.full((most,), -1, device=device),
            row=torch.zeros(1, dtype=torch.int64, device=device),
            table=torch.zeros(most, 1, 2, size // 2, device=device),
        )
        self._given: dict[str, Tensor] = {}  # inputs of the last part that are still there
        self._output = torch.zeros_like(self._inputs.query)
        self._graphs: dict[_Kind, torch.cuda.CUDAGraph] = {}

    def sample(self, requests: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [b, h, d], key and value [b, g, d] of some tokens without meaning."""
        query, key, value = self._inputs[:3]
        return query[:requests], key[:requests], value[:requests]

    def capture(self) -> None:
        """Capture all graphs anew, for the memory that the cache has now; it must be empty."""
        self._graphs.clear()
        self._given = {}
        device = self._cache.device
        current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self._compile()
        current.wait_stream(stream)
        kinds = starmap(_Kind, product(self._layers, self._sizes, (True, False)))
        self._graphs = capture(kinds, self._run, stream)

    def _compile(self) -> None:
        """Run one token of every kind, so that all kernels are compiled before they are captured.

        The token takes a page of each KV list of the first row, which is empty afterwards.
        """
        self._inputs.row.zero_()
        self._inputs.position.fill_(-1)
        self._inputs.position[0] = 0
        for size, begins in product(self._sizes, (True, False)):
            for layer in self._layers:
                self._run(_Kind(layer, size, begins))
            self._cache.free_row(0)

    def attend(self, layer: int, part: Part, begins: bool, output: Tensor) -> None:
        """Store the tokens of a part and write their attention.

        Args:
            layer: Layer number; layers are visited in order.
            part: The tokens.
            begins: Whether the cache holds nothing of the request.
            output: [n, h, d]; written.
        """
        count = len(part.position)
        captured = self._graphs or self._cache.device.type != "cuda"
        if count > self._longest or not captured:
            _attend(self._cache, layer, part, begins, None, output)
            return
        kind = _Kind(layer, next(size for size in self._sizes if size >= count), begins)
        self._copy(part, kind.size)
        if self._graphs:
            self._graphs[kind].replay()
        else:
            self._run(kind)
        output.copy_(self._output[:count])

    def _copy(self, part: Part, size: int) -> None:
        """Copy to the memory that graphs read what differs from the last part.

        Layers with the same RoPE differ only in query, key and value.
        """
        for name, memory, given in zip(Part._fields, self._inputs, part, strict=True):
            if self._given.get(name) is not given:
                memory[: len(given)] = given
        if self._given.get("position") is not part.position:
            self._inputs.position[len(part.position) : size] = -1
        self._given = {name: getattr(part, name) for name in ("position", "row", "table")}

    def _run(self, kind: _Kind) -> None:
        """Compute the part in `_inputs`."""
        part = Part(*(memory[: kind.size] for memory in self._inputs))
        output = self._output[: kind.size]
        _attend(self._cache, kind.layer, part, kind.begins, (kind.size,), output)


def _attend(
    cache: GrantedCache,
    layer: int,
    part: Part,
    begins: bool,
    lengths: tuple[int, ...] | None,
    output: Tensor,
) -> None:
    groups = part.key.shape[1]
    cos, sin = part.table[:, 0].repeat(1, 1, 2)[None, :, :, None, None].unbind(2)
    step = AttentionStep(
        query=part.query.unflatten(1, (groups, -1))[None],
        key=part.key.unsqueeze(2)[None],
        value=part.value.unsqueeze(2)[None],
        cos=cos,
        sin=sin,
        position=part.position[None],
        rows=part.row,
        spec=cache.specs[layer],
        lengths=lengths,
        begins=begins,
        table=part.table,
        sinks=cache.sinks[layer],
    )
    output.copy_(cache.step(layer, step).output[0].transpose(0, 1))
