"""Attention of a batch through the paged cache, without vLLM.

A decode step may be captured as a CUDA graph. Everything that a replay reads has a fixed address:
`StepInputs`, the cache, and the positions, which vLLM keeps in one buffer. The host reads nothing
back, neither in a decode step nor in a chunk of a prompt.

Shape letters: t tokens of a batch, b its requests, h query heads, g KV heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dms_train.kernels.decode.types import Step
from dms_train.vllm_plugin.cache import GrantedCache
from dms_train.vllm_plugin.part_graphs import Part, PartGraphs
from dms_train.vllm_plugin.single_graphs import MOST, SingleGraphs


class StepInputs:
    """Cache rows, RoPE and pages of a step, in memory that never moves.

    Args:
        tables: RoPE of each layer by position, [positions, d]: cosines, then sines. Layers with the
            same RoPE share one tensor.
        requests: Most requests of a batch.
        tokens: Most tokens of a batch.

    Attributes:
        rows: int64 [requests], cache rows of the requests; -1 after the last one.
        pages: int32 [requests], pages that the requests hold after the step; -1 after a fault.
        angles: [k, tokens, 2, d], cosines and sines of the tokens, both halves alike, for each of
            the k different tables.
        table_of: Index of the table of each layer.
    """

    def __init__(self, tables: list[Tensor], *, requests: int, tokens: int) -> None:
        different = {id(table): table for table in tables}
        numbers = {name: number for number, name in enumerate(different)}
        self.table_of = [numbers[id(table)] for table in tables]
        self._tables = [table.unflatten(1, (2, -1)) for table in different.values()]
        first = tables[0]
        self.rows = torch.full((requests,), -1, dtype=torch.int64, device=first.device)
        self.pages = torch.zeros_like(self.rows, dtype=torch.int32)
        self.angles = first.new_empty(len(different), tokens, 2, first.shape[1])

    def set_rows(self, rows: Tensor) -> None:
        """Set the rows of the requests of a step, integers [b]; the host does not wait."""
        self.rows[: len(rows)] = rows
        self.rows[len(rows) :] = -1

    def rotations(self, position: Tensor) -> list[Tensor]:
        """Return `interface.rotation_table` of positions, integers [t], for each table."""
        return [table[position].float().unsqueeze(1) for table in self._tables]

    def set_angles(self, position: Tensor) -> None:
        """Compute the angles of tokens, integers [t]."""
        for table, angles in zip(self._tables, self.angles, strict=True):
            halves = table[position]
            torch.cat([halves, halves], -1, out=angles[: len(position)])

    def angles_of(self, layer: int) -> Tensor:
        """Return the angles of the tokens in a layer, [tokens, 2, d]."""
        return self.angles[self.table_of[layer]]


class PromptPart(NamedTuple):
    """Several tokens of one request.

    Attributes:
        tokens: Slice of the batch that they are.
        position: int64 [n].
        row: Cache row, int64 [1].
        begins: Whether the cache holds nothing of the request.
        rotations: `StepInputs.rotations` of the tokens.
    """

    tokens: slice
    position: Tensor
    row: Tensor
    begins: bool
    rotations: list[Tensor]


class StepGraphs(NamedTuple):
    """Graphs of steps with a part of a prompt.

    Attributes:
        parts: Those of parts of prompts.
        singles: Those of requests with one token.
    """

    parts: PartGraphs
    singles: SingleGraphs

    @classmethod
    def build(
        cls,
        cache: GrantedCache,
        inputs: StepInputs,
        *,
        heads: int,
        dtype: torch.dtype,
        longest: int,
    ) -> StepGraphs:
        """Build what `capture` fills.

        Args:
            cache: The cache.
            inputs: Inputs of the steps.
            heads: Query heads.
            dtype: Type of the tokens.
            longest: Most tokens of a part.
        """
        angles = [inputs.angles_of(layer) for layer in range(len(inputs.table_of))]
        size = angles[0].shape[-1]
        parts = PartGraphs(cache, heads=heads, size=size, dtype=dtype, longest=longest)
        requests = len(inputs.rows)
        return cls(parts, SingleGraphs(cache, angles, heads=heads, dtype=dtype, requests=requests))

    def capture(self) -> None:
        """Capture all graphs anew, for the memory that the cache has now; it must be empty."""
        self.parts.capture()
        self.singles.capture()


@dataclass(frozen=True, slots=True, eq=False)
class BatchAttention:
    """Attention of the tokens of a batch; vLLM passes it to every layer as metadata.

    Attributes:
        cache: The cache.
        graphs: Graphs of the cache, for a batch with parts.
        inputs: Rows of the requests. The first layer writes the angles, the last one the pages.
        position: int64 [t]; for a captured step, in vLLM's buffer.
        singles: Number of requests with one token, padding included; they come first.
        parts: All other requests.
    """

    cache: GrantedCache
    graphs: StepGraphs
    inputs: StepInputs
    position: Tensor
    singles: int
    parts: list[PromptPart]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Store the tokens of a layer and write their attention.

        Args:
            layer: Layer number; layers are visited in order.
            query: [any, h, d]; entries after the tokens of the batch are padding.
            key: [any, g, d].
            value: [any, g, d].
            output: [any, h, d]; written, and 0 for padding.
        """
        if layer == 0:  # a replay computes the angles anew from its positions
            self.inputs.set_angles(self.position)
        output[len(self.position) :] = 0
        first, graphs = slice(self.singles), self.graphs.singles
        if self.parts and graphs.can_run(self.singles):
            if layer == 0:
                graphs.begin(self.position[first], self.inputs.rows[first])
            graphs.attend(layer, query[first], key[first], value[first], output[first])
        elif self.singles:  # vLLM may be capturing it
            self._decode(layer, query, key, value, output)
        for part in self.parts:
            self._prefill(layer, part, query, key, value, output)
        if layer == len(self.inputs.table_of) - 1:  # a replay counts them without the host
            requests = slice(self.singles + len(self.parts))
            self.inputs.pages[requests] = self.cache.held_pages(self.inputs.rows[requests])

    def _decode(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> None:
        first, angles = slice(self.singles), self.inputs.angles_of(layer)
        step = Step(
            query=query[first],
            key=key[first],
            value=value[first],
            cos=angles[first, 0],
            sin=angles[first, 1],
            position=self.position[first],
            rows=self.inputs.rows[first],
        )
        self.cache.attend(layer, step, output[first])

    def _prefill(
        self,
        layer: int,
        part: PromptPart,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
    ) -> None:
        tokens, table = part.tokens, part.rotations[self.inputs.table_of[layer]]
        heads = (query[tokens], key[tokens], value[tokens])
        given = Part(*heads, part.position, part.row, table)
        self.graphs.parts.attend(layer, given, part.begins, output[tokens])


def batch_attention(
    cache: GrantedCache, graphs: StepGraphs, inputs: StepInputs, input_batch: Any
) -> BatchAttention:
    """Describe a batch of vLLM for all layers.

    Args:
        cache: The cache.
        graphs: Graphs of the cache.
        inputs: Inputs of the step; the rows are set.
        input_batch: vLLM's batch; requests with one token come first.
    """
    position = input_batch.positions[: input_batch.num_tokens]
    counts = input_batch.num_scheduled_tokens.tolist()
    starts = input_batch.query_start_loc_np.tolist()
    computed = input_batch.num_computed_tokens_np.tolist()
    singles = counts.count(1)
    assert all(n == 1 for n in counts[:singles]), "vLLM no longer sorts single tokens first"
    parts = []
    for index in range(singles, len(counts)):
        tokens = slice(*starts[index : index + 2])
        own, row = position[tokens], inputs.rows[index, None]
        begins, rotations = computed[index] == 0, inputs.rotations(own)
        parts.append(PromptPart(tokens, own, row, begins, rotations))
    return BatchAttention(cache, graphs, inputs, position, singles, parts)


def compile_steps(cache: GrantedCache, graphs: StepGraphs, inputs: StepInputs) -> None:
    """Run decode steps that store nothing, so that none is compiled while requests wait.

    Kernels are compiled apart between powers of two, and there for numbers of KV lists that 16
    divides and for others.

    Args:
        cache: The cache.
        graphs: Graphs of the cache.
        inputs: Inputs of the steps; no row is set afterwards.
    """
    inputs.set_rows(inputs.rows[:0])
    for requests in _sizes_of_steps(min(len(inputs.rows), MOST)):
        query, key, value = graphs.parts.sample(requests)
        position = inputs.rows.new_zeros(requests)
        batch = BatchAttention(cache, graphs, inputs, position, requests, [])
        for layer in range(cache.lists_shape[0]):
            batch.attend(layer, query, key, value, torch.empty_like(query))


def _sizes_of_steps(most: int) -> list[int]:
    """Return the powers of two up to the next one of `most`, and the numbers before them."""
    powers = [2**k for k in range((most - 1).bit_length() + 1)]
    return sorted({min(n, most) for power in powers for n in (power - 1, power)} - {0})
