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


class StepInputs:
    """Cache rows and RoPE of a step, in memory that never moves.

    Args:
        table: RoPE by position, [positions, d]: cosines, then sines.
        requests: Most requests of a batch.
        tokens: Most tokens of a batch.

    Attributes:
        rows: int64 [requests], cache rows of the requests; -1 after the last one.
        angles: [tokens, 2, d], cosines and sines of the tokens, both halves alike.
    """

    def __init__(self, table: Tensor, *, requests: int, tokens: int) -> None:
        self._table = table.unflatten(1, (2, -1))
        self.rows = torch.full((requests,), -1, dtype=torch.int64, device=table.device)
        self.angles = table.new_empty(tokens, 2, table.shape[1])

    def set_rows(self, rows: Tensor) -> None:
        """Set the rows of the requests of a step, integers [b]; the host does not wait."""
        self.rows[: len(rows)] = rows
        self.rows[len(rows) :] = -1

    def rotation(self, position: Tensor) -> Tensor:
        """Return `interface.rotation_table` of positions, integers [t]."""
        return self._table[position].float().unsqueeze(1)

    def set_angles(self, position: Tensor) -> None:
        """Compute the angles of tokens, integers [t]."""
        halves = self._table[position]
        torch.cat([halves, halves], -1, out=self.angles[: len(position)])


class PromptPart(NamedTuple):
    """Several tokens of one request.

    Attributes:
        start: First token in the batch.
        stop: One after the last token.
        request: Index of the request in the batch.
        begins: Whether the cache holds nothing of the request.
        table: `rotation_table` of the tokens.
    """

    start: int
    stop: int
    request: int
    begins: bool
    table: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BatchAttention:
    """Attention of the tokens of a batch; vLLM passes it to every layer as metadata.

    Attributes:
        cache: The cache.
        graphs: Graphs of the cache.
        inputs: Rows of the requests. The first layer writes the angles.
        position: int64 [t]; for a captured step, in vLLM's buffer.
        singles: Number of requests with one token, padding included; they come first.
        parts: All other requests.
    """

    cache: GrantedCache
    graphs: PartGraphs
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
        if self.singles:
            self._decode(layer, query, key, value, output)
        for part in self.parts:
            self._prefill(layer, part, query, key, value, output)

    def _decode(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> None:
        first = slice(self.singles)
        step = Step(
            query=query[first],
            key=key[first],
            value=value[first],
            cos=self.inputs.angles[first, 0],
            sin=self.inputs.angles[first, 1],
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
        tokens = slice(part.start, part.stop)
        row = self.inputs.rows[part.request, None]
        given = Part(
            query[tokens], key[tokens], value[tokens], self.position[tokens], row, part.table
        )
        self.graphs.attend(layer, given, part.begins, output[tokens])


def batch_attention(
    cache: GrantedCache, graphs: PartGraphs, inputs: StepInputs, input_batch: Any
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
        start, stop = starts[index : index + 2]
        table = inputs.rotation(position[start:stop])
        parts.append(PromptPart(start, stop, index, computed[index] == 0, table))
    return BatchAttention(cache, graphs, inputs, position, singles, parts)
