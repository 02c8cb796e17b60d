"""Attention of parts of prompts, replayed as CUDA graphs.

A part takes about a hundred small kernels in each layer, which the host launches more slowly than
the GPU runs them, and all requests that decode wait for it. A graph holds one part in one layer,
padded to one of a few sizes. The first parts of a size and kind launch and compile their kernels,
the second ones are captured. Without a GPU, the same padded parts run without graphs.

Shape letters: n tokens of a part, h query heads, g KV heads, d head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.inference.cache.interface import AttentionStep
from dms_train.inference.prompt_graphs import chunk_sizes
from dms_train.vllm_plugin.cache import GrantedCache

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
        whole: True without padding.
        begins: True if the cache is empty for this request.
    """

    layer: int
    size: int
    whole: bool
    begins: bool


class PartGraphs:
    """Captured parts of prompts for one cache.

    Args:
        cache: The cache.
    """

    def __init__(self, cache: GrantedCache) -> None:
        self._cache = cache
        self._sizes = chunk_sizes(LONGEST)
        self._inputs: Part | None = None
        self._graphs: dict[_Kind, torch.cuda.CUDAGraph] = {}
        self._launched: set[_Kind] = set()

    def forget(self) -> None:
        """Drop the graphs, whose cache has other memory now."""
        self._graphs.clear()

    def attend(self, layer: int, part: Part, begins: bool, output: Tensor) -> None:
        """Store the tokens of a part and write their attention.

        Args:
            layer: Layer number; layers are visited in order.
            part: The tokens.
            begins: Whether the cache holds nothing of the request.
            output: [n, h, d]; written.
        """
        count = len(part.position)
        if count > LONGEST:
            _attend(self._cache, layer, part, begins, None, output)
            return
        size = next(size for size in self._sizes if size >= count)
        inputs = self._filled(part, size)
        kind = _Kind(layer, size, size == count, begins)
        if output.device.type != "cuda":
            self._run(kind, inputs)
        elif kind not in self._launched:
            self._launch(kind, inputs)
        else:
            if kind not in self._graphs:
                self._graphs[kind] = self._capture(kind, inputs)
            self._graphs[kind].replay()
        output.copy_(self._output[:count])

    def _filled(self, part: Part, size: int) -> Part:
        """Copy a part to the memory that graphs read; what lies after it is padding."""
        if self._inputs is None:
            self._allocate(part)
        assert self._inputs is not None
        count = len(part.position)
        for memory, given in zip(self._inputs, part, strict=True):
            memory[: len(given)] = given
        self._inputs.position[count:size] = -1
        return Part(*(memory[:size] for memory in self._inputs))

    def _allocate(self, part: Part) -> None:
        """Allocate the memory that graphs read and write; it never moves."""
        longest = {"row": 1}
        memory = (
            given.new_zeros(longest.get(name, LONGEST), *given.shape[1:])
            for name, given in part._asdict().items()
        )
        self._inputs = Part(*memory)
        self._output = torch.zeros_like(self._inputs.query)
        if self._output.device.type == "cuda":
            self._memory = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(self._output.device)

    def _run(self, kind: _Kind, inputs: Part) -> None:
        """Compute the part in `inputs`."""
        lengths = None if kind.whole else (kind.size,)
        output = self._output[: kind.size]
        _attend(self._cache, kind.layer, inputs, kind.begins, lengths, output)

    def _launch(self, kind: _Kind, inputs: Part) -> None:
        """Run a part on the capture stream, to compile its kernels before the capture."""
        current = torch.cuda.current_stream(self._output.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._run(kind, inputs)
        current.wait_stream(self._stream)
        self._launched.add(kind)

    def _capture(self, kind: _Kind, inputs: Part) -> torch.cuda.CUDAGraph:
        """Capture a part without computing it."""
        graph = torch.cuda.CUDAGraph()
        # vLLM's other threads may use the GPU meanwhile
        where = torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        )
        with where:
            self._run(kind, inputs)
        return graph


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
        spec=cache.spec,
        lengths=lengths,
        begins=begins,
        table=part.table,
    )
    output.copy_(cache.step(layer, step).output[0].transpose(0, 1))
