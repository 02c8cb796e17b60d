"""Steps with parts of prompts, replayed as CUDA graphs.

vLLM launches such a step layer by layer, more slowly than the GPU runs it, and all requests that
decode wait for it. A graph holds the whole model for one or two parts and the requests with one
token beside them, padded to one of a few sizes. All graphs are captured when vLLM captures its own.
Without a GPU, the same padded steps run without graphs.

Shape letters: t tokens with padding, b requests with one token, p parts, h query heads, g KV heads,
d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from dms_train.vllm_plugin.batch import (
    BatchAttention,
    Heads,
    PromptParts,
    SingleTokens,
    StepInputs,
    attend_parts,
    attend_singles,
)
from dms_train.vllm_plugin.cache import GrantedCache

_TOKENS = (64, 128, 256, 384, 512, 768, 1024)  # longer steps keep the GPU busy
_SINGLES = (8, 32, 128, 512)
_PARTS = (1, 2)  # the end of one prompt and the beginning of the next


class Kind(NamedTuple):
    """Sizes of a padded step.

    Attributes:
        tokens: Tokens of the step.
        singles: Requests with one token.
        parts: Parts of prompts, never padded.
    """

    tokens: int
    singles: int
    parts: int


class _Memory(NamedTuple):
    """Inputs of a replay, at fixed addresses.

    Attributes:
        ids: Token ids, int32 [t].
        position: int64 [t].
        rows: Cache rows of requests with one token, int64 [b]; -1 for padding.
        part_rows: Cache rows of the parts, int64 [p].
        starts: First token of each part and the end of the last one, int64 [p + 1].
    """

    ids: Tensor
    position: Tensor
    rows: Tensor
    part_rows: Tensor
    starts: Tensor


class _PaddedBatch:
    """Stands in for `BatchAttention` as the metadata of every layer in a padded step.

    Args:
        cache: The cache.
        inputs: Inputs of the step.
        memory: Other inputs of the step.
        kind: Sizes of the step.
    """

    def __init__(
        self, cache: GrantedCache, inputs: StepInputs, memory: _Memory, kind: Kind
    ) -> None:
        self._cache, self._inputs, self._memory, self._kind = cache, inputs, memory, kind
        self._singles = SingleTokens(memory.position[: kind.singles], memory.rows[: kind.singles])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Store the tokens of a layer and write their attention.

        Args:
            layer: Layer number; layers are visited in order.
            query: [t, h, d].
            key: [t, g, d].
            value: [t, g, d].
            output: [t, h, d]; written.
        """
        if layer == 0:
            self._locate()
        tokens, singles, parts = self._kind
        heads, shared = Heads(query, key, value), (self._cache, self._inputs, layer)
        attended = query.new_empty(singles + parts * tokens, *query.shape[1:])
        first = heads.at(slice(singles))
        attend_singles(*shared, first, self._singles, attended[:singles])
        rest = heads.at(self._places)
        attended[singles:].view(rest.query.shape)[:] = attend_parts(*shared, rest, self._parts)
        output[:] = attended[self._sources]
        if layer == len(self._inputs.table_of) - 1:
            self._inputs.report_pages(self._cache, singles + parts)

    def _locate(self) -> None:
        """Find the tokens of the parts, which differ from one replay to the next."""
        tokens, singles, parts = self._kind
        memory, number = self._memory, torch.arange(tokens, device=self._cache.device)
        begin, end = memory.starts[:parts, None], memory.starts[1 : parts + 1, None]
        inside = begin + number < end
        self._places = torch.where(inside, begin + number, 0)  # [p, t]
        position = memory.position[self._places]
        rotations = self._inputs.rotations(position)
        position = torch.where(inside, position, -1)
        self._parts = PromptParts(position, memory.part_rows[:parts], False, lambda: rotations)
        part = (number >= end[:-1]).sum(0)  # of each token, [t]
        source = singles + part * tokens + number - begin[part, 0]
        self._sources = torch.where(number < begin[0], number, source)
        self._inputs.set_angles(self._singles.position)


class MixedSteps:
    """Captured steps with parts of prompts, for one cache and one model.

    Args:
        cache: The cache.
        inputs: Inputs of the steps.
        forward: (metadata of a layer, token ids [t], positions [t]) -> hidden states [t, any].
        tokens: Most tokens of a step; there are no graphs for more than 1,024.
    """

    def __init__(
        self,
        cache: GrantedCache,
        inputs: StepInputs,
        forward: Callable[[_PaddedBatch, Tensor, Tensor], Tensor],
        *,
        tokens: int,
    ) -> None:
        self._cache, self._inputs, self._forward = cache, inputs, forward
        requests, most = len(inputs.rows), min(tokens, _TOKENS[-1])
        self._tokens = [*(size for size in _TOKENS if size < most), most]
        self._singles = [*(size for size in _SINGLES if size < requests), requests]
        numbers = inputs.rows.new_zeros  # int64
        self._memory = _Memory(
            ids=numbers(most, dtype=torch.int32),
            position=numbers(most),
            rows=torch.full_like(inputs.rows, -1),
            part_rows=numbers(_PARTS[-1]),
            starts=numbers(_PARTS[-1] + 1),
        )
        self._hidden: Tensor | None = None
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}

    def kind_of(self, batch: BatchAttention, tokens: int) -> Kind | None:
        """Return the sizes with which a batch can run; None if it needs others.

        Args:
            batch: The batch.
            tokens: Tokens of the batch, with the padding of vLLM.
        """
        if len(batch.parts) not in _PARTS or tokens > self._tokens[-1]:
            return None
        size = next(size for size in self._tokens if size >= tokens)
        singles = next(size for size in self._singles if size >= batch.singles)
        kind = Kind(size, min(size, singles), len(batch.parts))
        can_run = kind in self._graphs or self._cache.device.type != "cuda"
        return kind if can_run else None

    def run(self, kind: Kind, batch: BatchAttention, ids: Tensor, position: Tensor) -> Tensor:
        """Compute a batch.

        Args:
            kind: Result of `kind_of`.
            batch: The batch.
            ids: Token ids, integers [any].
            position: Integers [any].

        Returns:
            Hidden states [any, hidden size]; the next step overwrites them.
        """
        memory, singles, after = self._memory, batch.singles, batch.singles + kind.parts
        memory.ids[: len(ids)] = ids
        memory.position[: len(ids)] = position
        memory.rows[:singles] = self._inputs.rows[:singles]
        memory.rows[singles:] = -1
        memory.part_rows[: kind.parts] = self._inputs.rows[singles:after]
        memory.starts[: kind.parts + 1] = batch.starts[singles : after + 1]
        if self._graphs:
            self._graphs[kind].replay()
        else:
            self._run(kind)
        assert self._hidden is not None
        return self._hidden[: len(ids)]

    def forget(self) -> None:
        """Drop the graphs, which write to the memory that the cache had."""
        self._graphs.clear()

    def capture(self) -> None:
        """Capture all graphs, for the memory that the cache has now; it must be empty."""
        device = self._cache.device
        current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.compile()
        current.wait_stream(stream)
        memory = torch.cuda.graph_pool_handle()
        for kind in self._kinds():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory, stream=stream):
                self._run(kind)
            self._graphs[kind] = graph

    def compile(self) -> None:
        """Run one token of each part of every kind; the cache is empty afterwards."""
        memory = self._memory
        memory.position.zero_()
        memory.rows.fill_(-1)
        memory.part_rows.copy_(torch.arange(_PARTS[-1]))
        memory.starts.copy_(torch.arange(_PARTS[-1] + 1))
        for kind in self._kinds():
            self._run(kind)
            for row in range(kind.parts):
                self._cache.free_row(row)

    def _kinds(self) -> list[Kind]:
        """Return all kinds, the largest first, whose memory the others can use.

        vLLM 0.33 first measures with few pages; `compile` takes one of every KV list of a part.
        """
        layers, rows, groups = self._cache.lists_shape
        most = min(rows, self._cache.pool.max_pages // (layers * groups))
        parts = [count for count in _PARTS if count <= most]
        sizes = product(self._tokens, self._singles, parts)
        return sorted({Kind(t, min(t, b), p) for t, b, p in sizes}, reverse=True)

    def _run(self, kind: Kind) -> None:
        """Compute the step in memory."""
        batch = _PaddedBatch(self._cache, self._inputs, self._memory, kind)
        first = slice(kind.tokens)
        hidden = self._forward(batch, self._memory.ids[first], self._memory.position[first])
        if self._hidden is None:
            self._hidden = hidden.new_zeros(len(self._memory.ids), *hidden.shape[1:])
        self._hidden[first] = hidden
